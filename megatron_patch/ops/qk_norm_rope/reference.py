"""Norm per head, then rotation, in plain PyTorch: the two ops one after the other."""

from __future__ import annotations

import torch

from ..rms_norm import reference as norm
from ..rope.reference import rotate


def qk_norm_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.qk_norm_rope`."""
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)

    def both(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rotate(norm.rms_norm(x.flatten(1, -2), weight, None, eps)[0], cos, sin)

    return both(query, query_weight), both(key, key_weight)
