"""The gradient through log-softmax and temperature in plain PyTorch."""

from __future__ import annotations

import torch

from ..elementary import exp
from ..formats import accumulator_dtype


def logits_gradient(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    targets: torch.Tensor,
    normaliser: torch.Tensor,
    gradient: torch.Tensor,
    first_column: int,
    real_columns: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See `op.logits_gradient`."""
    wide = accumulator_dtype(logits.dtype)
    temperature = temperature.to(wide)
    scaled = logits.to(wide) / temperature
    # One division a row: the gradient of a scaled logit over the temperature is that of a logit.
    weight = (gradient.to(wide) / temperature.view(-1)).unsqueeze(1)
    out = -(exp(scaled - normaliser.unsqueeze(1)) * weight)
    column = torch.arange(logits.shape[1], device=logits.device)
    target = (targets - first_column).unsqueeze(1)
    out = torch.where(column == target, out + weight, out)
    return torch.where(column < real_columns, out, 0.0).to(out_dtype).contiguous()
