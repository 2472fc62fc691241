"""RMSNorm in plain PyTorch: the written order, and what runs on a CPU."""

from __future__ import annotations

import torch

from ..elementary import pair_sum, sqrt
from ..formats import accumulator_dtype, rounded_dtype


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.rms_norm`. Zhang & Sennrich, 2019 (arXiv 1910.07467)."""
    wide = accumulator_dtype(x.dtype)
    narrow = rounded_dtype(x.dtype, "bfloat16")
    stream = x.to(wide)
    if residual is not None:
        stream = stream + residual
    mean_square = pair_sum(stream * stream) / x.shape[-1]
    scale = 1.0 / sqrt(mean_square + eps)
    normalised = (stream * scale.unsqueeze(-1)).to(narrow)
    return (normalised.to(wide) * weight.to(wide)).to(narrow), stream
