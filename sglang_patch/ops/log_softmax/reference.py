"""Log-softmax over vocabulary segments in plain PyTorch: the written order, and the CPU's."""

from __future__ import annotations

import torch

from ..elementary import exp, log, pair_sum


def segment_statistics(
    logits: torch.Tensor, width: int, num_segments: int, real_columns: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.segment_statistics`."""
    rows, columns = logits.shape
    padded = logits.new_full((rows, num_segments * width), float("-inf"))
    padded[:, : min(columns, num_segments * width)] = logits[:, : num_segments * width]
    padded = padded.view(rows, num_segments, width)
    counts = torch.tensor(real_columns, device=logits.device)
    real = torch.arange(width, device=logits.device) < counts[:, None]
    padded = padded.masked_fill(~real, float("-inf"))
    largest = padded.amax(dim=-1)
    # An empty segment has no maximum: shift by 0, every exp is then exactly 0.
    shift = largest.masked_fill(largest == float("-inf"), 0.0)
    return largest, pair_sum(exp(padded - shift.unsqueeze(-1)))


def combine_segments(largest: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """See `op.combine_segments`."""
    overall = largest.amax(dim=-1)
    scaled = total * exp(largest - overall.unsqueeze(-1))
    return overall + log(pair_sum(scaled))
