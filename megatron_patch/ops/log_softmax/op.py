"""`log_softmax` in two halves that meet at a handful of numbers a row.

Each rank reduces its own segments to a maximum and a sum of exponentials; the halves are exchanged
and combined in the order of the segments, so no rank needs a full row of the vocabulary.
"""

from __future__ import annotations

import torch

from ...schema.vocabulary import VocabularySegments
from ..formats import NAMESPACE, accumulator_dtype, require
from . import reference


@torch.library.custom_op(f"{NAMESPACE}::segment_statistics", mutates_args=(), device_types="cpu")
def _segment_statistics(
    logits: torch.Tensor, width: int, num_segments: int, real_columns: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.segment_statistics(logits, width, num_segments, real_columns)


@_segment_statistics.register_kernel("cuda")
def _(
    logits: torch.Tensor, width: int, num_segments: int, real_columns: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    from .kernel import launch_segment_statistics

    return launch_segment_statistics(logits, width, num_segments, real_columns)


@_segment_statistics.register_fake
def _(
    logits: torch.Tensor, width: int, num_segments: int, real_columns: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], num_segments)
    return logits.new_empty(shape), logits.new_empty(shape)


@torch.library.custom_op(f"{NAMESPACE}::combine_segments", mutates_args=(), device_types="cpu")
def _combine_segments(largest: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return reference.combine_segments(largest, total)


@_combine_segments.register_kernel("cuda")
def _(largest: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    from .kernel import launch_combine_segments

    return launch_combine_segments(largest, total)


@_combine_segments.register_fake
def _(largest: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return largest.new_empty(largest.shape[:1])


def temperature_logits(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Logits over temperature, a true fp32 division. logits: [rows, columns] as the lm_head left
    them; temperature: [rows, 1] fp32, or a scalar tensor."""
    require(
        logits.device == temperature.device,
        f"temperature_logits: logits on {logits.device}, temperature on {temperature.device}; a "
        "host's number would be divided by as a multiplication with its reciprocal",
    )
    wide = accumulator_dtype(logits.dtype)
    return torch.div(logits.to(wide), temperature.to(wide))


def segment_statistics(
    logits: torch.Tensor, segments: VocabularySegments, first_segment: int, num_segments: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum and sum of exponentials of some consecutive vocabulary segments.

    logits: [rows, columns] fp32; column 0 is the first column of `first_segment`. Columns past the
    real vocabulary are ignored; missing ones at the end are taken as padding. Returns (largest,
    total), each [rows, num_segments] fp32, total relative to its segment's maximum.
    """
    require(
        logits.dtype in (torch.float32, torch.float64),
        f"segment_statistics: logits are {logits.dtype}; they must be float32, never through bf16",
    )
    real = [segments.real_columns(first_segment + i) for i in range(num_segments)]
    missing = sum(real) - logits.shape[1]
    require(
        missing <= 0,
        f"segment_statistics: {logits.shape[1]} columns given, segments {first_segment} to "
        f"{first_segment + num_segments - 1} hold {sum(real)} real ones",
    )
    return _segment_statistics(logits, segments.width, num_segments, real)


def combine_segments(largest: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Log of the sum of exponentials from all segments, [rows, segments] -> [rows] fp32.

    The segments' sums are scaled to the overall maximum and added as a balanced tree.
    """
    return _combine_segments(largest, total)


def log_softmax(logits: torch.Tensor, segments: VocabularySegments) -> torch.Tensor:
    """Log-softmax of whole rows: logits [rows, >= vocab_size] fp32 -> [rows, vocab_size] fp32.

    A token's value is `logit - logsumexp`, one fp32 subtraction, as the trainer computes it.
    """
    largest, total = segment_statistics(logits, segments, 0, segments.num_segments)
    normaliser = combine_segments(largest, total)
    return logits[:, : segments.vocab_size] - normaliser.unsqueeze(-1)
