"""Digests of token rows, from the record of every rank to one table a side.

A table holds one digest per token of the batch and tapped tensor. Tensor-parallel shards of a row
are added, pipeline stages bring their layers, context-parallel ranks their tokens; a token that the
rollout found in its prefix cache has the digest from where the same prefix was computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .flow import SCORED_OPS, Place

Digests = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# The streams of a pass, by the numbers in which spans name them.
STREAMS = ("tokens", "head", "scored", "prompt")


class TokenSlots:
    """Numbers for the tokens of a batch: sequence by sequence, position by position."""

    def __init__(self, tokens: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> None:
        """tokens: prompt and response of every sequence."""
        self.lengths = [len(sequence) for sequence in tokens]
        self.starts = np.cumsum([0, *self.lengths])
        self.sequence = np.repeat(np.arange(len(tokens)), self.lengths)
        self.position = np.concatenate([np.arange(length) for length in self.lengths])
        self.ids = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in tokens])
        prompts = np.repeat(np.asarray(prompt_lengths), self.lengths)
        self.in_prompt: Mask = self.position < prompts
        # The last token of a sequence is never fed to the rollout: nothing follows it.
        last = np.repeat(np.asarray(self.lengths), self.lengths) - 1
        self._fed: Mask = self.position < last
        self._scored: Mask = self._fed & (self.position >= prompts - 1)
        self.prefix = _prefixes(tokens)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def needed(self, place: Place) -> Mask:
        """[slots]: the tokens that both sides must have at this place."""
        return self._scored if place.op in SCORED_OPS else self._fed

    def token(self, slot: int) -> tuple[int, int]:
        """(sequence, position) of a slot."""
        return int(self.sequence[slot]), int(self.position[slot])

    def holds(self, tokens: Integers) -> Mask:
        """[n] of [n, 2]: whether each is a token of the batch. (The engine runs ahead: it may
        compute a token past the end of a sequence before it sees that the sequence has ended.)"""
        lengths = np.asarray(self.lengths)
        held: Mask = tokens[:, 1] < lengths[tokens[:, 0]]
        return held

    def same_prefix(self, slot: int) -> list[tuple[int, int]]:
        """The tokens that have the same tokens up to and including themselves."""
        return [self.token(int(s)) for s in np.flatnonzero(self.prefix == self.prefix[slot])]

    def by_position(self, slots: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """`slots` by position, and by sequence within one."""
        order = np.lexsort((self.sequence[slots], self.position[slots]))
        ordered: npt.NDArray[Any] = slots[order]
        return ordered


def _prefixes(tokens: Sequence[Sequence[int]]) -> Integers:
    """[slots]: equal numbers for tokens whose whole prefixes are equal."""
    numbers: dict[tuple[int, int], int] = {}
    found = []
    for sequence in tokens:
        parent = -1
        for token in sequence:
            parent = numbers.setdefault((parent, token), len(numbers))
            found.append(parent)
    return np.asarray(found, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TapRows:
    """One tap of one rank: `whole`, every rank holds the row; spans: [n, 4] (stream, pass, first
    row, rows); digests: [rows] int64, span after span."""

    whole: bool
    spans: Integers
    digests: Integers


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Rows of one tap that a rank stored: columns [width], tokens [m, 2], bits [m, width]."""

    columns: Integers
    tokens: Integers
    bits: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank recorded. passes: per stream the [rows, 2] tokens of every forward pass."""

    side: str
    tp_rank: int
    passes: Mapping[str, Sequence[Integers]]
    taps: Mapping[str, TapRows]
    rows: Mapping[str, KeptRows]

    @classmethod
    def of(cls, side: str, tp_rank: int, dump: Mapping[str, Any]) -> RankRecord:
        """From a rank's dump (`ops.taps.TapLog.dump`), with tensors or arrays.

        Raises `ValueError` naming the rank where something is missing or does not fit.
        """
        try:
            return cls(
                side,
                tp_rank,
                {name: [_array(p) for p in parts] for name, parts in dump["passes"].items()},
                {
                    name: TapRows(tap["whole"], _array(tap["spans"]), _array(tap["digests"]))
                    for name, tap in dump["taps"].items()
                },
                {
                    name: KeptRows(*(np.asarray(kept[k]) for k in ("columns", "tokens", "bits")))
                    for name, kept in dump["rows"].items()
                },
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{side} rank {tp_rank}: not a record of taps ({error!r})") from None

    @property
    def digest_bytes(self) -> int:
        """What the digests and the names of their rows take."""
        arrays = [part for parts in self.passes.values() for part in parts]
        arrays += [array for tap in self.taps.values() for array in (tap.spans, tap.digests)]
        return sum(array.nbytes for array in arrays)

    @property
    def row_bytes(self) -> int:
        """What the stored rows take."""
        return sum(k.columns.nbytes + k.tokens.nbytes + k.bits.nbytes for k in self.rows.values())

    def located(self, tap: str) -> tuple[Integers, Integers, Integers]:
        """(tokens [rows, 2], their row numbers in their passes [rows], digests [rows]) of a tap,
        rows of no token left out. `ValueError` where the record is not whole."""
        rows = self.taps[tap]
        tokens, numbers = [], []
        for stream, number, first, count in rows.spans.tolist():
            passes = self.passes[STREAMS[stream]]
            part = passes[number][first : first + count] if number < len(passes) else []
            if len(part) != count:
                raise ValueError(
                    f"{self.side} rank {self.tp_rank}: {tap} has {count} rows of pass {number}, "
                    f"which has {len(part)}"
                )
            tokens.append(part)
            numbers.append(np.arange(first, first + count))
        where = np.concatenate(tokens) if tokens else np.empty((0, 2), dtype=np.int64)
        if len(where) != len(rows.digests):
            raise ValueError(
                f"{self.side} rank {self.tp_rank}: {tap} has {len(rows.digests)} digests of "
                f"{len(where)} rows"
            )
        real = where[:, 0] >= 0
        row_numbers = np.concatenate(numbers) if numbers else np.empty(0, dtype=np.int64)
        return where[real], row_numbers[real], rows.digests[real]


def _array(values: Any) -> Integers:
    return np.asarray(values, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class SideRows:
    """One tap on one side. ranks: [tp, slots] the digest of each rank's row or shard; `whole`:
    every rank has the row."""

    place: Place
    ranks: Digests
    is_whole: bool

    @property
    def digests(self) -> Digests:
        """[slots]: the digest of the global row (of rank 0's, where every rank has all of it)."""
        if self.is_whole:
            return self.ranks[0]
        return self.ranks.sum(axis=0, dtype=np.uint64)

    @property
    def disagree(self) -> Mask:
        """[slots]: the ranks should hold one row and do not."""
        if not self.is_whole:
            return np.zeros(self.ranks.shape[1], dtype=np.bool_)
        disagree: Mask = (self.ranks != self.ranks[0]).any(axis=0)
        return disagree


def side_rows(
    records: Sequence[RankRecord], tp_size: int, place: Place, slots: TokenSlots
) -> SideRows:
    """Put the ranks' records of one tap together.

    Raises `ValueError` naming side, rank, op and token where one is missing.
    """
    needed = slots.needed(place)
    ranks = np.zeros((tp_size, len(slots)), dtype=np.uint64)
    whole = set()
    side = records[0].side if records else "a side"
    for rank in range(tp_size):
        mine = [r for r in records if r.tp_rank == rank and place.tap in r.taps]
        if not mine:
            raise ValueError(f"{side}: tensor-parallel rank {rank} recorded no rows of {place}")
        present = np.zeros(len(slots), dtype=np.bool_)
        for record in mine:
            tokens, _, digests = record.located(place.tap)
            inside = slots.holds(tokens)
            where = slots.starts[tokens[inside, 0]] + tokens[inside, 1]
            present[where] = True
            # Of a token that was computed again (a retracted request) the last digest stays.
            ranks[rank, where] = digests[inside].view(np.uint64)
            whole.add(record.taps[place.tap].whole)
        if place.op not in SCORED_OPS:
            # (Equal prefixes go on with different tokens: what is scored is each one's own.)
            _from_cache(ranks[rank], present, needed, slots)
        missing = np.flatnonzero(needed & ~present)
        if len(missing):
            sequence, position = slots.token(int(missing[0]))
            raise ValueError(
                f"{side}: rank {rank} recorded {int((needed & present).sum())} of "
                f"{int(needed.sum())} token rows of {place}; the first missing one is sequence "
                f"{sequence} position {position}"
            )
    if len(whole) != 1:
        raise ValueError(f"{side}: some ranks recorded {place} whole, others in shards")
    return SideRows(place, ranks, whole.pop())


def _from_cache(digests: Digests, present: Mask, needed: Mask, slots: TokenSlots) -> None:
    """Fill in the tokens whose keys and values came from another sequence with their prefix."""
    wanted = np.flatnonzero(needed & ~present)
    if not len(wanted):
        return
    computed = np.flatnonzero(present)
    prefixes, first = np.unique(slots.prefix[computed], return_index=True)
    where = np.searchsorted(prefixes, slots.prefix[wanted])
    where = np.minimum(where, max(len(prefixes) - 1, 0))
    known = prefixes[where] == slots.prefix[wanted] if len(prefixes) else np.zeros(0, np.bool_)
    if known.any():
        sources = computed[first[where[known]]]
        digests[wanted[known]] = digests[sources]
        present[wanted[known]] = True
