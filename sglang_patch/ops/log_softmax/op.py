"""`log_softmax` in two halves that meet at a handful of numbers a row.

Each rank reduces its own segments to a maximum and a sum of exponentials; the halves are exchanged
and combined in the order of the segments, so no rank needs a full row of the vocabulary.
"""

from __future__ import annotations

import torch

from ...schema.vocabulary import VocabularySegments
from ..formats import NAMESPACE, accumulator_dtype, eager_on_gpu, require
from . import reference

_Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op(f"{NAMESPACE}::segment_statistics", mutates_args=(), device_types="cpu")
def _segment_statistics(
    logits: torch.Tensor,
    width: int,
    num_segments: int,
    real_columns: list[int],
    temperature: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.segment_statistics(logits, width, num_segments, real_columns, temperature)


@_segment_statistics.register_kernel("cuda")
def _(
    logits: torch.Tensor,
    width: int,
    num_segments: int,
    real_columns: list[int],
    temperature: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from .kernel import launch_statistics

    return launch_statistics(logits, temperature, None, 0, width, num_segments, real_columns)[:2]


@_segment_statistics.register_fake
def _(
    logits: torch.Tensor,
    width: int,
    num_segments: int,
    real_columns: list[int],
    temperature: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], num_segments)
    wide = accumulator_dtype(logits.dtype)
    return logits.new_empty(shape, dtype=wide), logits.new_empty(shape, dtype=wide)


@torch.library.custom_op(f"{NAMESPACE}::token_statistics", mutates_args=(), device_types="cpu")
def _token_statistics(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    targets: torch.Tensor,
    first_column: int,
    width: int,
    num_segments: int,
    real_columns: list[int],
    entropy: bool,
) -> _Four:
    return reference.token_statistics(
        logits, temperature, targets, first_column, width, num_segments, real_columns, entropy
    )


@_token_statistics.register_kernel("cuda")
def _(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    targets: torch.Tensor,
    first_column: int,
    width: int,
    num_segments: int,
    real_columns: list[int],
    entropy: bool,
) -> _Four:
    from .kernel import launch_statistics

    return launch_statistics(
        logits, temperature, targets, first_column, width, num_segments, real_columns, entropy
    )


@_token_statistics.register_fake
def _(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    targets: torch.Tensor,
    first_column: int,
    width: int,
    num_segments: int,
    real_columns: list[int],
    entropy: bool,
) -> _Four:
    wide = accumulator_dtype(logits.dtype)

    def made(columns: int) -> torch.Tensor:
        return logits.new_empty((logits.shape[0], columns), dtype=wide)

    return (
        made(num_segments),
        made(num_segments),
        made(num_segments),
        made(num_segments if entropy else 0),
    )


@torch.library.custom_op(f"{NAMESPACE}::combine_segments", mutates_args=(), device_types="cpu")
def _combine_segments(
    largest: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor | None = None
) -> torch.Tensor:
    if weighted is None:
        return reference.combine_segments(largest, total)
    return reference.combine_entropy(largest, total, weighted)


@_combine_segments.register_kernel("cuda")
def _(
    largest: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor | None = None
) -> torch.Tensor:
    from .kernel import launch_combine_segments

    return launch_combine_segments(largest, total, weighted)


@_combine_segments.register_fake
def _(
    largest: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor | None = None
) -> torch.Tensor:
    return largest.new_empty(largest.shape[:1])


@torch.library.custom_op(f"{NAMESPACE}::log_softmax", mutates_args=(), device_types="cpu")
def _log_softmax(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    largest: torch.Tensor,
    total: torch.Tensor,
    columns: int,
) -> torch.Tensor:
    return reference.log_softmax(logits, temperature, largest, total, columns)


@_log_softmax.register_kernel("cuda")
def _(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    largest: torch.Tensor,
    total: torch.Tensor,
    columns: int,
) -> torch.Tensor:
    from .kernel import launch_log_softmax

    return launch_log_softmax(logits, temperature, largest, total, columns)


@_log_softmax.register_fake
def _(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    largest: torch.Tensor,
    total: torch.Tensor,
    columns: int,
) -> torch.Tensor:
    return logits.new_empty((logits.shape[0], columns), dtype=accumulator_dtype(logits.dtype))


def _check_temperature(name: str, logits: torch.Tensor, temperature: torch.Tensor) -> None:
    require(
        logits.device == temperature.device,
        f"{name}: logits on {logits.device}, temperature on {temperature.device}; a "
        "host's number would be divided by as a multiplication with its reciprocal",
    )


def temperature_logits(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Logits over temperature, a true fp32 division. logits: [rows, columns] as the lm_head left
    them; temperature: [rows, 1] fp32, or a scalar tensor."""
    _check_temperature("temperature_logits", logits, temperature)
    return reference.scaled_logits(logits, temperature)


def _real_columns(
    name: str,
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    segments: VocabularySegments,
    first_segment: int,
    num_segments: int,
) -> list[int]:
    if temperature is None:
        require(
            logits.dtype in (torch.float32, torch.float64),
            f"{name}: logits are {logits.dtype}; they must be float32, never through bf16",
        )
    else:
        _check_temperature(name, logits, temperature)
    real = [segments.real_columns(first_segment + i) for i in range(num_segments)]
    require(
        sum(real) <= logits.shape[1],
        f"{name}: {logits.shape[1]} columns given, segments {first_segment} to "
        f"{first_segment + num_segments - 1} hold {sum(real)} real ones",
    )
    return real


def segment_statistics(
    logits: torch.Tensor, segments: VocabularySegments, first_segment: int, num_segments: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum and sum of exponentials of some consecutive vocabulary segments.

    logits: [rows, columns] fp32; column 0 is the first column of `first_segment`. Columns past the
    real vocabulary are ignored; missing ones at the end are taken as padding. Returns (largest,
    total), each [rows, num_segments] fp32, total relative to its segment's maximum.
    """
    name = "segment_statistics"
    real = _real_columns(name, logits, None, segments, first_segment, num_segments)
    return _statistics_of(logits, segments.width, num_segments, real, None)


def _statistics_of(
    logits: torch.Tensor,
    width: int,
    num_segments: int,
    real: list[int],
    temperature: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if eager_on_gpu(logits):
        from .kernel import launch_statistics

        return launch_statistics(logits, temperature, None, 0, width, num_segments, real)[:2]
    return _segment_statistics(logits, width, num_segments, real, temperature)


def token_statistics(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    targets: torch.Tensor,
    segments: VocabularySegments,
    first_segment: int,
    num_segments: int,
    *,
    entropy: bool = False,
) -> _Four:
    """`segment_statistics` of logits / temperature in one launch, and the targets' logits.

    logits: [rows, columns] fp32, or bf16 as a v1 lm_head left them; temperature: fp32, a scalar
    tensor or [rows, 1] (None: already divided, fp32); targets: [rows] int64, real token ids.
    Returns (largest, total, chosen, weighted), each [rows, num_segments] fp32: chosen is the
    scaled logit of the row's target where the segment holds it, otherwise 0; weighted is the sum
    of exp(s - largest) * (s - largest) over scaled logits s, no columns unless `entropy`.
    """
    name = "token_statistics"
    real = _real_columns(name, logits, temperature, segments, first_segment, num_segments)
    require(
        targets.dtype == torch.int64 and targets.shape == logits.shape[:1],
        f"{name}: targets {targets.dtype} {tuple(targets.shape)} for {logits.shape[0]} rows; they "
        "must be int64, one a row",
    )
    first_column = first_segment * segments.width
    if eager_on_gpu(logits):
        from .kernel import launch_statistics

        return launch_statistics(
            logits, temperature, targets, first_column, segments.width, num_segments, real, entropy
        )
    return _token_statistics(
        logits, temperature, targets, first_column, segments.width, num_segments, real, entropy
    )


def combine_segments(largest: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Log of the sum of exponentials from all segments, [rows, segments] -> [rows] fp32.

    The segments' sums are scaled to the overall maximum and added as a balanced tree.
    """
    return _combined(largest, total, None)


def _combined(
    largest: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor | None
) -> torch.Tensor:
    if eager_on_gpu(largest):
        from .kernel import launch_combine_segments

        return launch_combine_segments(largest, total, weighted)
    return _combine_segments(largest, total, weighted)


def combine_entropy(
    largest: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor
) -> torch.Tensor:
    """Entropy (nats) of the softmax from all segments' `token_statistics`, [rows, segments] ->
    [rows] fp32: log of the sum of exponentials minus the mean exponent, both relative to the
    overall maximum, in the tree of `combine_segments`.
    """
    return _combined(largest, total, weighted)


def log_softmax(
    logits: torch.Tensor,
    segments: VocabularySegments,
    temperature: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-softmax of whole rows of logits / temperature, in two launches.

    logits: [rows, >= vocab_size] fp32, or with a temperature also bf16; temperature: fp32, a scalar
    tensor or [rows, 1] (None: one). Returns [rows, vocab_size] fp32. A token's value is
    `logit - logsumexp`, one fp32 subtraction, as the trainer computes it.
    """
    real = _real_columns("log_softmax", logits, temperature, segments, 0, segments.num_segments)
    largest, total = _statistics_of(
        logits, segments.width, segments.num_segments, real, temperature
    )
    if eager_on_gpu(logits):
        from .kernel import launch_log_softmax

        return launch_log_softmax(logits, temperature, largest, total, segments.vocab_size)
    return _log_softmax(logits, temperature, largest, total, segments.vocab_size)
