"""Rotary position embedding in plain PyTorch: the written order, and what runs on a CPU."""

from __future__ import annotations

import torch

from ..formats import accumulator_dtype


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, head_dim]; cos, sin: [tokens, 1, head_dim / 2]. Halves, not pairs
    (Su et al., 2021, arXiv 2104.09864, in the GPT-NeoX arrangement that Qwen uses)."""
    wide = accumulator_dtype(x.dtype)
    first, second = x.to(wide).chunk(2, dim=-1)
    # Four products and two sums, each rounded: a fused multiply-add on one side would differ.
    left = first * cos - second * sin
    right = second * cos + first * sin
    return torch.cat((left, right), dim=-1).to(x.dtype)


def rope(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.rope`."""
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return rotate(query, cos, sin), rotate(key, cos, sin)
