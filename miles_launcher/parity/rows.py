"""Digests of token rows, from the record of every rank to one table a side.

A table holds one digest per token of the batch and op. Tensor-parallel shards of a row are added,
pipeline stages bring their layers, context-parallel ranks their tokens; a token that the rollout
found in its prefix cache has the digest from where the same prefix was computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..faults import FINAL, LAYER_OPS

Digests = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

# Rows of these are whole on every tensor-parallel rank; of the others each rank has its columns.
WHOLE_OPS = frozenset(
    {
        "embedding",
        "input_layernorm",
        "o_proj",
        "post_attention_layernorm",
        "down_proj",
        "final_norm",
        "logprob",
    }
)
SCORED_OPS = frozenset({"lm_head", "logprob"})
_QK_NORMS = frozenset({"q_norm", "k_norm"})


@dataclass(frozen=True, slots=True)
class Place:
    """An op in a layer; `layer` is None outside the layers."""

    layer: int | None
    op: str

    @property
    def tap(self) -> str:
        """The name in a rank's record."""
        return f"{FINAL if self.layer is None else self.layer}.{self.op}"

    def __str__(self) -> str:
        return self.op if self.layer is None else f"layer {self.layer} {self.op}"


def data_flow(num_layers: int, qk_layernorm: bool) -> tuple[Place, ...]:
    """Every tapped op in the order in which a token passes them."""
    ops = [op for op in LAYER_OPS if qk_layernorm or op not in _QK_NORMS]
    return (
        Place(None, "embedding"),
        *(Place(layer, op) for layer in range(num_layers) for op in ops),
        Place(None, "final_norm"),
        Place(None, "lm_head"),
        Place(None, "logprob"),
    )


class TokenSlots:
    """Numbers for the tokens of a batch: sequence by sequence, position by position."""

    def __init__(self, tokens: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> None:
        """tokens: prompt and response of every sequence."""
        self.lengths = [len(sequence) for sequence in tokens]
        self.starts = np.cumsum([0, *self.lengths])
        self.sequence = np.repeat(np.arange(len(tokens)), self.lengths)
        self.position = np.concatenate([np.arange(length) for length in self.lengths])
        prompts = np.repeat(np.asarray(prompt_lengths), self.lengths)
        # The last token of a sequence is never fed to the rollout: nothing follows it.
        last = np.repeat(np.asarray(self.lengths), self.lengths) - 1
        self._fed: Mask = self.position < last
        self._scored: Mask = self._fed & (self.position >= prompts - 1)
        self.prefix = _prefixes(tokens)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def needed(self, place: Place) -> Mask:
        """[slots]: the tokens that both sides must have at this op."""
        return self._scored if place.op in SCORED_OPS else self._fed

    def token(self, slot: int) -> tuple[int, int]:
        """(sequence, position) of a slot."""
        return int(self.sequence[slot]), int(self.position[slot])

    def same_prefix(self, slot: int) -> list[tuple[int, int]]:
        """The tokens that have the same tokens up to and including themselves."""
        return [self.token(int(s)) for s in np.flatnonzero(self.prefix == self.prefix[slot])]


def _prefixes(tokens: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
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
class RankRecord:
    """What one rank recorded: per tap [n, 3] int64 (sequence, position, digest), and kept rows."""

    side: str
    tp_rank: int
    taps: Mapping[str, npt.NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class SideRows:
    """One op on one side. ranks: [tp, slots] the digest of each rank's row or shard."""

    place: Place
    ranks: Digests

    @property
    def whole(self) -> Digests:
        """[slots]: the digest of the global row (of rank 0's, where every rank has all of it)."""
        if self.place.op in WHOLE_OPS:
            return self.ranks[0]
        return self.ranks.sum(axis=0, dtype=np.uint64)

    @property
    def disagree(self) -> Mask:
        """[slots]: the ranks should hold one row and do not."""
        if self.place.op not in WHOLE_OPS:
            return np.zeros(self.ranks.shape[1], dtype=np.bool_)
        disagree: Mask = (self.ranks != self.ranks[0]).any(axis=0)
        return disagree


def side_rows(
    records: Sequence[RankRecord], tp_size: int, place: Place, slots: TokenSlots
) -> SideRows:
    """Put the ranks' records of one op together.

    Raises `ValueError` naming side, rank, op and token where one is missing.
    """
    needed = slots.needed(place)
    ranks = np.zeros((tp_size, len(slots)), dtype=np.uint64)
    for rank in range(tp_size):
        mine = [r.taps[place.tap] for r in records if r.tp_rank == rank and place.tap in r.taps]
        side = records[0].side if records else "a side"
        if not mine:
            raise ValueError(f"{side}: tensor-parallel rank {rank} recorded no rows of {place}")
        rows = np.concatenate(mine)
        where = slots.starts[rows[:, 0]] + rows[:, 1]
        present = np.zeros(len(slots), dtype=np.bool_)
        present[where] = True
        # Of a token that was computed again (a retracted request) the last digest stays.
        ranks[rank, where] = rows[:, 2].view(np.uint64)
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
    return SideRows(place, ranks)


def _from_cache(digests: Digests, present: Mask, needed: Mask, slots: TokenSlots) -> None:
    """Fill in the tokens whose keys and values came from another sequence with their prefix."""
    first: dict[int, int] = {}
    for slot in np.flatnonzero(present):
        first.setdefault(int(slots.prefix[slot]), int(slot))
    for slot in np.flatnonzero(needed & ~present):
        source = first.get(int(slots.prefix[slot]))
        if source is not None:
            digests[slot], present[slot] = digests[source], True
