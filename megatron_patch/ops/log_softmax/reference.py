"""Log-softmax over vocabulary segments in plain PyTorch: the written order, and the CPU's."""

from __future__ import annotations

import torch

from ..elementary import exp, log, pair_sum
from ..formats import accumulator_dtype


def scaled_logits(logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """logits [rows, columns] over temperature (None: as they are), in fp32."""
    wide = accumulator_dtype(logits.dtype)
    if temperature is None:
        return logits.to(wide)
    return torch.div(logits.to(wide), temperature.to(wide))


def _segments(
    logits: torch.Tensor, width: int, num_segments: int, real_columns: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, segments, width] with -inf wherever a column is not real, and the maxima."""
    rows, columns = logits.shape
    padded = logits.new_full((rows, num_segments * width), float("-inf"))
    padded[:, : min(columns, num_segments * width)] = logits[:, : num_segments * width]
    padded = padded.view(rows, num_segments, width)
    counts = torch.tensor(real_columns, device=logits.device)
    real = torch.arange(width, device=logits.device) < counts[:, None]
    padded = padded.masked_fill(~real, float("-inf"))
    return padded, padded.amax(dim=-1)


def segment_statistics(
    logits: torch.Tensor,
    width: int,
    num_segments: int,
    real_columns: list[int],
    temperature: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.segment_statistics`."""
    scaled = scaled_logits(logits, temperature)
    padded, largest = _segments(scaled, width, num_segments, real_columns)
    # An empty segment has no maximum: shift by 0, every exp is then exactly 0.
    shift = largest.masked_fill(largest == float("-inf"), 0.0)
    return largest, pair_sum(exp(padded - shift.unsqueeze(-1)))


def token_statistics(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    targets: torch.Tensor,
    first_column: int,
    width: int,
    num_segments: int,
    real_columns: list[int],
    entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `op.token_statistics`."""
    scaled = scaled_logits(logits, temperature)
    padded, largest = _segments(scaled, width, num_segments, real_columns)
    shift = largest.masked_fill(largest == float("-inf"), 0.0)
    shifted = padded - shift.unsqueeze(-1)
    exponentials = exp(shifted)
    weighted = scaled.new_empty((scaled.shape[0], 0))
    if entropy:
        real = padded != float("-inf")
        weighted = pair_sum(torch.where(real, exponentials * shifted, 0.0))
    starts = first_column + width * torch.arange(num_segments, device=logits.device)
    local = targets.unsqueeze(1) - starts
    inside = (local >= 0) & (local < torch.tensor(real_columns, device=logits.device))
    picked = padded.gather(2, local.clamp(0, width - 1).unsqueeze(2)).squeeze(2)
    return largest, pair_sum(exponentials), torch.where(inside, picked, 0.0), weighted


def _combined(
    largest: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    overall = largest.amax(dim=-1)
    factor = exp(largest - overall.unsqueeze(-1))
    return overall, factor, pair_sum(total * factor)


def combine_segments(largest: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """See `op.combine_segments`."""
    overall, _, whole = _combined(largest, total)
    return overall + log(whole)


def combine_entropy(
    largest: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor
) -> torch.Tensor:
    """See `op.combine_entropy`."""
    overall, factor, whole = _combined(largest, total)
    # An empty segment has no distance from the overall maximum.
    empty = largest == float("-inf")
    distance = (largest - overall.unsqueeze(-1)).masked_fill(empty, 0.0)
    return log(whole) - pair_sum(factor * (weighted + total * distance)) / whole


def log_softmax(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    largest: torch.Tensor,
    total: torch.Tensor,
    columns: int,
) -> torch.Tensor:
    """See `op.log_softmax`."""
    scaled = scaled_logits(logits[:, :columns], temperature)
    return (scaled - combine_segments(largest, total).unsqueeze(-1)).contiguous()
