"""The first wrong bit: rollout against trainer, op by op, in the order of the data flow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .rows import Mask, Place, RankRecord, SideRows, TokenSlots, side_rows

BISECT_FILE = "bisect.json"
_FLOAT_BYTES = {2: "bfloat16", 4: "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRows:
    """One op of the whole run: token rows compared, and how many of them differ."""

    place: Place
    compared: int
    differ: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The first divergence. `odd` is the one side and tensor-parallel rank whose copy of a row is
    unlike all the others', where there is exactly one. `inputs_equal`: at every op before this
    one, the token and every earlier token of its sequence had equal rows."""

    place: Place
    slot: int
    sequence: int
    position: int
    differ: int
    compared: int
    inputs_equal: bool
    odd: tuple[str, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """The first differing element of a row: its column in the global row, the bits of both sides,
    their distance in ulps (None where one is not a finite number), the tensor-parallel rank that
    computed it on each side, and how many elements of the row differ."""

    column: int
    dtype: str
    rollout_bits: str
    trainer_bits: str
    ulp: int | None
    rollout_rank: int
    trainer_rank: int
    elements_differ: int
    elements: int


def compare_rows(
    rollout: Sequence[RankRecord],
    trainer: Sequence[RankRecord],
    tp_sizes: tuple[int, int],
    flow: Sequence[Place],
    slots: TokenSlots,
) -> tuple[list[OpRows], Found | None]:
    """Every op in order, and the first divergence: of the first op with a differing row, the token
    at the earliest position, then of the lowest sequence.

    tp_sizes: of rollout and trainer. Raises `ValueError` where a rank, an op or a token is missing
    on a side, or where there is nothing to compare.
    """
    ops: list[OpRows] = []
    found: Found | None = None
    equal_so_far: Mask = np.ones(len(slots), dtype=np.bool_)
    for place in flow:
        ours = side_rows(rollout, tp_sizes[0], place, slots)
        theirs = side_rows(trainer, tp_sizes[1], place, slots)
        needed = slots.needed(place)
        wrong = needed & ((ours.whole != theirs.whole) | ours.disagree | theirs.disagree)
        if not needed.any():
            raise ValueError(f"{place}: no token row to compare; nothing would be shown")
        ops.append(OpRows(place=place, compared=int(needed.sum()), differ=int(wrong.sum())))
        if found is None and wrong.any():
            found = _found(ours, theirs, ops[-1], wrong, equal_so_far, slots)
        equal_so_far &= ~wrong
    return ops, found


def _found(
    ours: SideRows,
    theirs: SideRows,
    rows: OpRows,
    wrong: Mask,
    equal_so_far: Mask,
    slots: TokenSlots,
) -> Found:
    candidates = np.flatnonzero(wrong)
    order = np.lexsort((slots.sequence[candidates], slots.position[candidates]))
    slot = int(candidates[order[0]])
    sequence, position = slots.token(slot)
    start = int(slots.starts[sequence])
    return Found(
        place=rows.place,
        slot=slot,
        sequence=sequence,
        position=position,
        differ=rows.differ,
        compared=rows.compared,
        inputs_equal=bool(equal_so_far[start : slot + 1].all()),
        odd=_odd(ours, theirs, slot),
    )


def _odd(ours: SideRows, theirs: SideRows, slot: int) -> tuple[str, int] | None:
    """The one rank whose row is unlike all others', of an op whose row every rank holds whole."""
    if not (ours.disagree[slot] or theirs.disagree[slot]):
        return None
    copies = [
        (side, rank, int(digest))
        for side, rows in (("rollout", ours), ("trainer", theirs))
        for rank, digest in enumerate(rows.ranks[:, slot])
    ]
    counts = Counter(digest for _, _, digest in copies)
    alone = [(side, rank) for side, rank, digest in copies if counts[digest] == 1]
    return alone[0] if len(alone) == 1 and len(counts) == 2 else None


def kept_rows(
    records: Sequence[RankRecord], tokens: Sequence[tuple[int, int]]
) -> dict[int, tuple[int, npt.NDArray[np.int64]]]:
    """The stored row of the first of `tokens` that a side computed: per tensor-parallel rank
    (bytes an element, [2, width] int64 of columns and bits).

    Raises `ValueError` where no rank stored one of them.
    """
    for sequence, position in tokens:
        rows = {
            record.tp_rank: (int(name.split(".")[1]), row)
            for record in records
            for name, row in record.taps.items()
            if name.startswith("row.") and name.endswith(f".{sequence}.{position}")
        }
        if rows:
            return rows
    side = records[0].side if records else "a side"
    raise ValueError(f"{side}: the second pass stored none of the token rows {list(tokens)}")


def first_element(
    rollout: Mapping[int, tuple[int, npt.NDArray[np.int64]]],
    trainer: Mapping[int, tuple[int, npt.NDArray[np.int64]]],
) -> Element | None:
    """The first column in which a rank of one side has other bits than a rank of the other; None
    where the stored rows are equal (the second pass did not repeat the first)."""
    different: dict[int, Element] = {}
    columns: set[int] = set()
    for our_rank, (size, ours) in rollout.items():
        for their_rank, (their_size, theirs) in trainer.items():
            if size != their_size:
                raise ValueError(f"rows of {size} bytes an element, and of {their_size}")
            shared, here, there = np.intersect1d(ours[0], theirs[0], return_indices=True)
            real = shared >= 0
            shared, left, right = shared[real], ours[1][here][real], theirs[1][there][real]
            columns |= set(shared.tolist())
            for index in np.flatnonzero(left != right):
                column = int(shared[index])
                if column not in different:
                    different[column] = _element(
                        column, size, int(left[index]), int(right[index]), our_rank, their_rank
                    )
    if not different:
        return None
    first = different[min(different)]
    return Element(
        **{
            **{name: getattr(first, name) for name in Element.__slots__},
            "elements_differ": len(different),
            "elements": len(columns),
        }
    )


def _element(
    column: int, size: int, ours: int, theirs: int, our_rank: int, their_rank: int
) -> Element:
    bits = 8 * size
    mask = (1 << bits) - 1
    return Element(
        column=column,
        dtype=_FLOAT_BYTES[size],
        rollout_bits=f"{ours & mask:0{size * 2}x}",
        trainer_bits=f"{theirs & mask:0{size * 2}x}",
        ulp=ulp_distance(ours & mask, theirs & mask, size),
        rollout_rank=our_rank,
        trainer_rank=their_rank,
        elements_differ=0,
        elements=0,
    )


def ulp_distance(ours: int, theirs: int, size: int) -> int | None:
    """Steps between two numbers of a format, by their unsigned bits; `size` 2 is bfloat16, 4
    float32. None where one is infinite or not a number; 0.0 and -0.0 are 0 apart."""
    sign = 1 << (8 * size - 1)
    infinity = 0x7F80 if size == 2 else 0x7F800000
    places = []
    for bits in (ours, theirs):
        magnitude = bits & (sign - 1)
        if magnitude >= infinity:
            return None
        places.append(-magnitude if bits & sign else magnitude)
    return abs(places[0] - places[1])


def divergence_data(found: Found, element: Element | None) -> dict[str, Any]:
    """`first_divergence` of `bisect.json`."""
    side, rank = found.odd if found.odd is not None else (None, None)
    data: dict[str, Any] = {
        "layer": found.place.layer,
        "op": found.place.op,
        "token": {"sequence": found.sequence, "position": found.position},
        "token_rows_differ": found.differ,
        "token_rows_compared": found.compared,
        "inputs_equal": found.inputs_equal,
        "side": side,
        "rank": rank,
        "bits": None,
        "ulp": None,
        "element": None,
    }
    if element is not None:
        data["bits"] = {"rollout": element.rollout_bits, "trainer": element.trainer_bits}
        data["ulp"] = element.ulp
        data["element"] = {
            "column": element.column,
            "dtype": element.dtype,
            "rollout_rank": element.rollout_rank,
            "trainer_rank": element.trainer_rank,
            "differ": element.elements_differ,
            "of": element.elements,
        }
    return data


def sentence(found: Found, element: Element | None) -> str:
    """What a person reads."""
    text = f"first divergence: {found.place}, sequence {found.sequence} position {found.position}"
    if element is not None:
        distance = "not numbers" if element.ulp is None else f"{element.ulp} ulp"
        text += (
            f", element {element.column}: rollout {element.rollout_bits}, trainer "
            f"{element.trainer_bits} ({element.dtype}, {distance}; {element.elements_differ} of "
            f"{element.elements} elements)"
        )
    if found.odd is not None:
        text += f"; {found.odd[0]} rank {found.odd[1]} is unlike every other rank"
    text += f"; {found.differ} of {found.compared} token rows differ there, and its inputs are "
    return text + (f"equal: {found.place.op} is at fault" if found.inputs_equal else "not equal")
