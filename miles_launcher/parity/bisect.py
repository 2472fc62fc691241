"""The first wrong bit: two sides against each other, tensor by tensor, in the order of the flow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .flow import OUTPUT, Place, inputs_of, made_of
from .rows import Mask, RankRecord, SideRows, TokenSlots, side_rows

BISECT_FILE = "bisect.json"
# Attention reads these of every earlier token of the sequence as well.
_OF_EARLIER_TOKENS = ("key", "value")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRows:
    """One tapped tensor of the whole run: token rows compared, and how many of them differ."""

    place: Place
    compared: int
    differ: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The first divergence. `inputs`: what enters the op (of an input: what that is made of), and
    whether its rows are equal. `odd`: the one side and tensor-parallel rank whose copy of a row is
    unlike all the others', where there is exactly one."""

    place: Place
    slot: int
    sequence: int
    position: int
    differ: int
    compared: int
    inputs: tuple[tuple[Place, bool], ...]
    odd: tuple[str, int] | None

    @property
    def sources_equal(self) -> bool:
        """Everything that the differing tensor is made from is equal."""
        return all(equal for _, equal in self.inputs)

    @property
    def inputs_equal(self) -> bool:
        """The op's inputs are equal, so that the op itself is at fault."""
        return self.place.is_output and self.sources_equal


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Every tapped tensor in order; `wrong` [slots] of those in which any row differs."""

    ops: list[OpRows] = field(default_factory=list)
    found: Found | None = None
    wrong: dict[Place, Mask] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Token rows compared, over all tensors."""
        return sum(op.compared for op in self.ops)


@dataclass(frozen=True, slots=True)
class Flow:
    """The model's tapped tensors (`flow.data_flow`), in order."""

    places: tuple[Place, ...]
    num_layers: int
    qk_layernorm: bool

    def sources(self, place: Place) -> tuple[Place, ...]:
        """What a tensor is made of, among the places compared."""
        found = (
            inputs_of(place)
            if place.is_output
            else made_of(place, self.num_layers, self.qk_layernorm)
        )
        return tuple(source for source in found if source in self.places)


def compare_rows(
    ours: Sequence[RankRecord],
    theirs: Sequence[RankRecord],
    tp_sizes: tuple[int, int],
    flow: Flow,
    slots: TokenSlots,
) -> Comparison:
    """Every tensor in order, and the first divergence: of the first one with a differing row, the
    token at the earliest position, then of the lowest sequence.

    tp_sizes: of the two sides. Raises `ValueError` where a rank, an op or a token is missing on a
    side, or where there is nothing to compare.
    """
    result = Comparison()
    for place in flow.places:
        left = side_rows(ours, tp_sizes[0], place, slots)
        right = side_rows(theirs, tp_sizes[1], place, slots)
        needed = slots.needed(place)
        wrong = needed & ((left.digests != right.digests) | left.disagree | right.disagree)
        if not needed.any():
            raise ValueError(f"{place}: no token row to compare; nothing would be shown")
        result.ops.append(OpRows(place=place, compared=int(needed.sum()), differ=int(wrong.sum())))
        if wrong.any():
            result.wrong[place] = wrong
            if result.found is None:
                sides = (ours[0].side, left), (theirs[0].side, right)
                result.found = _found(sides, result, flow, slots)
    return result


def _found(
    sides: tuple[tuple[str, SideRows], tuple[str, SideRows]],
    result: Comparison,
    flow: Flow,
    slots: TokenSlots,
) -> Found:
    rows = result.ops[-1]
    slot = int(slots.by_position(np.flatnonzero(result.wrong[rows.place]))[0])
    sequence, position = slots.token(slot)
    inputs = []
    for source in flow.sources(rows.place):
        first = int(slots.starts[sequence]) if source.tensor in _OF_EARLIER_TOKENS else slot
        wrong = result.wrong.get(source)
        inputs.append((source, wrong is None or not wrong[first : slot + 1].any()))
    return Found(
        place=rows.place,
        slot=slot,
        sequence=sequence,
        position=position,
        differ=rows.differ,
        compared=rows.compared,
        inputs=tuple(inputs),
        odd=_odd(sides, slot),
    )


def _odd(
    sides: tuple[tuple[str, SideRows], tuple[str, SideRows]], slot: int
) -> tuple[str, int] | None:
    """The one rank whose row is unlike all others', of a row that every rank holds whole."""
    if not any(rows.disagree[slot] for _, rows in sides):
        return None
    copies = [
        (side, rank, int(digest))
        for side, rows in sides
        for rank, digest in enumerate(rows.ranks[:, slot] if rows.is_whole else [])
    ]
    copies += [(side, 0, int(rows.digests[slot])) for side, rows in sides if not rows.is_whole]
    counts = Counter(digest for _, _, digest in copies)
    alone = [(side, rank) for side, rank, digest in copies if counts[digest] == 1]
    return alone[0] if len(alone) == 1 and len(counts) == 2 else None


def heat_map(result: Comparison, num_layers: int, slots: TokenSlots) -> dict[str, Any]:
    """Tokens against layers: of how many tapped tensors of the layer the token's row differs."""
    layers: list[str | int] = ["embedding", *range(num_layers), "head"]
    counts = np.zeros((len(slots), len(layers)), dtype=np.int64)
    for place, wrong in result.wrong.items():
        counts[:, layer_column(place, num_layers)] += wrong
    shown = np.flatnonzero(slots.needed(Place(None, "embedding")))
    return {
        "layers": layers,
        "tokens": [list(slots.token(int(slot))) for slot in shown],
        "rows_differ": counts[shown].tolist(),
        "elements_differ": [None] * len(shown),
    }


def layer_column(place: Place, num_layers: int) -> int:
    """The column of the heat map: the embedding, the layers, the head."""
    if place.op == "embedding":
        return 0
    return num_layers + 1 if place.layer is None else 1 + place.layer


def first_divergence(
    found: Found, slots: TokenSlots, element: Mapping[str, Any] | None
) -> dict[str, Any]:
    """`first_divergence` of `bisect.json`; `element` as `elements.first_element` gives it."""
    side, rank = found.odd if found.odd is not None else (None, None)
    return {
        **found.place.data(),
        "side": side,
        "rank": rank,
        "judged_by": None if found.odd is None else "ranks",
        "token": {
            "sequence": found.sequence,
            "position": found.position,
            "id": int(slots.ids[found.slot]),
            "part": "prompt" if slots.in_prompt[found.slot] else "response",
        },
        "token_rows_differ": found.differ,
        "token_rows_compared": found.compared,
        "inputs_equal": found.inputs_equal,
        "inputs": [{**place.data(), "equal": equal} for place, equal in found.inputs],
        **(element or {"bits": None, "ulp": None, "element": None}),
    }


def sentence(data: Mapping[str, Any], between: Sequence[str]) -> str:
    """What a person reads, from `first_divergence`."""
    place = Place(data["layer"], data["op"], data["tensor"])
    token = data["token"]
    text = f"first divergence: {place}, sequence {token['sequence']} position {token['position']}"
    element = data["element"]
    if element is not None:
        distance = "not numbers" if data["ulp"] is None else f"{data['ulp']} ulp"
        bits = ", ".join(f"{side} {data['bits'][side]}" for side in between)
        text += (
            f", element {element['column']}: {bits} ({element['dtype']}, {distance}; "
            f"{element['differ']} of {element['of']} elements)"
        )
    if data["judged_by"] is not None:
        who = data["side"] if data["rank"] is None else f"{data['side']} rank {data['rank']}"
        unlike = "every other rank" if data["judged_by"] == "ranks" else "the reference"
        text += f"; {who} is unlike {unlike}"
    text += (
        f"; {data['token_rows_differ']} of {data['token_rows_compared']} token rows differ there, "
    )
    sources = [Place(i["layer"], i["op"], i["tensor"]) for i in data["inputs"] if i["equal"]]
    different = [Place(i["layer"], i["op"], i["tensor"]) for i in data["inputs"] if not i["equal"]]
    if different:
        return text + "and so do its inputs: " + ", ".join(str(p) for p in different)
    if data["tensor"] == OUTPUT:
        return text + f"and its inputs are equal: {place.op} is at fault"
    made = " and ".join(str(source) for source in sources)
    return text + f"and {made} are equal: what carries them into {place.op} is at fault"
