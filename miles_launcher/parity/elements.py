"""Stored rows of both sides: the first differing element, ulp distances, elements a token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .flow import Place
from .rows import Integers, RankRecord

_DTYPES = {2: "bfloat16", 4: "float32"}
_INFINITY = {2: 0x7F80, 4: 0x7F800000}
_MISSING = np.int64(-(1 << 40))


class StoredRow:
    """One row of one side: per tensor-parallel rank its elements at their global columns."""

    def __init__(self, size: int, ranks: Mapping[int, tuple[Integers, Integers]]) -> None:
        """size: bytes an element; ranks: (columns [n], bits [n] as unsigned) of each rank."""
        self.size, self.ranks = size, ranks

    @property
    def width(self) -> int:
        """One more than the last column that any rank holds."""
        return 1 + max((int(c.max()) for c, _ in self.ranks.values() if len(c)), default=-1)

    def dense(self, rank: int, width: int) -> Integers:
        """[width]: the bits of a rank at their columns, `_MISSING` where it has none."""
        columns, bits = self.ranks[rank]
        row = np.full(width, _MISSING, dtype=np.int64)
        row[columns] = bits
        return row


def stored_row(
    records: Sequence[RankRecord], place: Place, tokens: Iterable[tuple[int, int]]
) -> StoredRow | None:
    """The stored row of the first of `tokens` that the side computed, or None."""
    for token in tokens:
        ranks: dict[int, tuple[Integers, Integers]] = {}
        size = 0
        for record in records:
            kept = record.rows.get(place.tap)
            if kept is None:
                continue
            where = np.flatnonzero((kept.tokens == token).all(axis=1))
            if not len(where):
                continue
            size = kept.bits.dtype.itemsize
            counted = kept.columns >= 0
            # Of a token that was computed again the last row stays.
            bits = kept.bits[where[-1]].astype(np.int64) & ((1 << 8 * size) - 1)
            ranks[record.tp_rank] = (kept.columns[counted], bits[counted])
        if ranks:
            return StoredRow(size, ranks)
    return None


def _pairs(ours: StoredRow, theirs: StoredRow) -> Iterable[tuple[int, int, Integers, Integers]]:
    """(our rank, their rank, our row, their row) of all ranks that share columns."""
    if ours.size != theirs.size:
        raise ValueError(f"rows of {ours.size} bytes an element, and of {theirs.size}")
    width = max(ours.width, theirs.width)
    right = {rank: theirs.dense(rank, width) for rank in theirs.ranks}
    for our_rank in sorted(ours.ranks):
        left = ours.dense(our_rank, width)
        for their_rank in sorted(right):
            yield our_rank, their_rank, left, right[their_rank]


def differing(ours: StoredRow, theirs: StoredRow) -> npt.NDArray[np.bool_]:
    """[width]: the columns in which any rank of one side differs from any of the other."""
    wrong = np.zeros(max(ours.width, theirs.width), dtype=np.bool_)
    for _, _, left, right in _pairs(ours, theirs):
        wrong |= (left != right) & (left != _MISSING) & (right != _MISSING)
    return wrong


def first_element(
    ours: StoredRow, theirs: StoredRow, between: Sequence[str]
) -> dict[str, Any] | None:
    """`bits`, `ulp` and `element` of the first differing column; None where all are equal."""
    wrong = differing(ours, theirs)
    if not wrong.any():
        return None
    column = int(np.argmax(wrong))
    for our_rank, their_rank, left, right in _pairs(ours, theirs):
        a, b = int(left[column]), int(right[column])
        if a != b and _MISSING not in (a, b):
            digits = 2 * ours.size
            return {
                "bits": {between[0]: f"{a:0{digits}x}", between[1]: f"{b:0{digits}x}"},
                "ulp": ulp_distance(a, b, ours.size),
                "element": {
                    "column": column,
                    "dtype": _DTYPES[ours.size],
                    "ranks": {between[0]: our_rank, between[1]: their_rank},
                    "differ": int(wrong.sum()),
                    "of": len(wrong),
                },
            }
    raise AssertionError("a column that differs differs in some pair")


def ulp_distance(ours: int, theirs: int, size: int) -> int | None:
    """Steps between two numbers of a format, by their unsigned bits; `size` 2 is bfloat16, 4
    float32. None where one is infinite or not a number; 0.0 and -0.0 are 0 apart."""
    distances, valid = ulp_distances(np.array([ours]), np.array([theirs]), size)
    return int(distances[0]) if valid[0] else None


def ulp_distances(
    ours: Integers, theirs: Integers, size: int
) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Element by element (distances, whether both are finite numbers)."""
    sign = 1 << (8 * size - 1)
    places, valid = [], np.ones(len(ours), dtype=np.bool_)
    for bits in (ours, theirs):
        magnitude = bits & (sign - 1)
        valid &= magnitude < _INFINITY[size]
        places.append(np.where(bits & sign, -magnitude, magnitude))
    return np.abs(places[0] - places[1]), valid


def ulp_histogram(
    place: Place, pairs: Sequence[tuple[StoredRow, StoredRow]]
) -> dict[str, Any] | None:
    """Of the stored rows of one tensor: how far apart their differing elements are, in buckets
    [low, high, count] that double; None without rows."""
    if not pairs:
        return None
    distances: list[int] = []
    elements = not_numbers = 0
    for ours, theirs in pairs:
        wrong = differing(ours, theirs)
        elements += len(wrong)
        seen = np.zeros(len(wrong), dtype=np.bool_)
        for _, _, left, right in _pairs(ours, theirs):
            mine = (left != right) & (left != _MISSING) & (right != _MISSING) & ~seen
            seen |= mine
            far, valid = ulp_distances(left[mine], right[mine], ours.size)
            distances += far[valid].tolist()
            not_numbers += int((~valid).sum())
    buckets: list[list[int]] = []
    # 0 is +0.0 against -0.0.
    zeros = sum(1 for distance in distances if distance == 0)
    if zeros:
        buckets.append([0, 0, zeros])
    low = 1
    while distances and low <= max(distances):
        high = 2 * low - 1
        buckets.append([low, high, sum(1 for d in distances if low <= d <= high)])
        low *= 2
    return {
        **place.data(),
        "rows": len(pairs),
        "elements": elements,
        "differ": len(distances) + not_numbers,
        "not_numbers": not_numbers,
        "buckets": buckets,
    }
