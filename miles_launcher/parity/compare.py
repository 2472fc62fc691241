"""Rollout against trainer, token by token, on the bits of the fp32 logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logprobs = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMismatch:
    """One response token whose logprobs differ; bits as 8 hex digits, distance in fp32 ulps (None
    where a side is not a number)."""

    sequence: int
    position: int
    token_id: int
    rollout: float
    trainer: float
    rollout_bits: str
    trainer_bits: str
    ulp: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What one batch showed. `max_abs_diff` is inf where a side holds no number; `first` are the
    first mismatches in order of sequence and position."""

    compared_tokens: int
    mismatched_tokens: int
    max_abs_diff: float
    first: tuple[TokenMismatch, ...]


def as_logprobs(values: Sequence[float]) -> Logprobs:
    """fp32 from Python floats that hold fp32 values; `ValueError` where one would be rounded."""
    wide = np.asarray(values, dtype=np.float64)
    narrow = wide.astype(np.float32)
    if not np.array_equal(narrow.astype(np.float64), wide, equal_nan=True):
        raise ValueError("a logprob is not an fp32 number: it was rounded or widened on the way")
    return narrow


def _ordered(bits: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Integers in the order of the floats, so that their difference counts ulps."""
    wide = bits.astype(np.int64)
    return np.where(wide < 0, -(wide & 0x7FFFFFFF), wide)


def compare(
    rollout: Sequence[Logprobs],
    trainer: Sequence[Logprobs],
    token_ids: Sequence[Sequence[int]],
    *,
    keep: int = 8,
) -> Comparison:
    """Compare the response tokens of a batch; each argument holds one array per sequence.

    Equal means equal bits: -0.0 is not 0.0, and a NaN equals nothing, itself included. Raises
    `ValueError` where a sequence's lengths differ, for then tokens would be compared with others.
    """
    if not len(rollout) == len(trainer) == len(token_ids):
        raise ValueError(
            f"{len(rollout)} rollout, {len(trainer)} trainer, {len(token_ids)} token sequences"
        )
    compared = mismatched = 0
    largest = 0.0
    first: list[TokenMismatch] = []
    for index, (ours, theirs, ids) in enumerate(zip(rollout, trainer, token_ids, strict=True)):
        if ours.dtype != np.float32 or theirs.dtype != np.float32:
            raise ValueError(f"sequence {index}: logprobs are {ours.dtype} and {theirs.dtype}")
        if not ours.shape == theirs.shape == (len(ids),):
            raise ValueError(
                f"sequence {index}: {ours.shape} rollout and {theirs.shape} trainer logprobs for "
                f"{len(ids)} response tokens"
            )
        compared += len(ids)
        our_bits, their_bits = ours.view(np.int32), theirs.view(np.int32)
        numbers = np.isfinite(ours) & np.isfinite(theirs)
        wrong = np.flatnonzero((our_bits != their_bits) | ~numbers)
        if not len(wrong):
            continue
        mismatched += len(wrong)
        distance = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
        largest = max(largest, float(np.where(numbers, distance, np.inf)[wrong].max()))
        ulps = np.abs(_ordered(our_bits) - _ordered(their_bits))
        for position in wrong[: max(0, keep - len(first))]:
            first.append(
                TokenMismatch(
                    sequence=index,
                    position=int(position),
                    token_id=int(ids[position]),
                    rollout=float(ours[position]),
                    trainer=float(theirs[position]),
                    rollout_bits=f"{int(our_bits[position]) & 0xFFFFFFFF:08x}",
                    trainer_bits=f"{int(their_bits[position]) & 0xFFFFFFFF:08x}",
                    ulp=int(ulps[position]) if numbers[position] else None,
                )
            )
    return Comparison(
        compared_tokens=compared,
        mismatched_tokens=mismatched,
        max_abs_diff=largest,
        first=tuple(first),
    )
