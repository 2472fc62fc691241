"""Rotary position embedding: its gradient is the rotation by the opposite angle."""

from __future__ import annotations

from typing import Any

import torch

from .. import ops
from ..function import apply
from ..ops.formats import accumulator_dtype
from .products import op_calls


def rotate_back(gradient: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotation by the opposite angle, in fp32 (fp64). gradient: [tokens, heads, dim]; cos,
    sin: [tokens, 1, dim / 2]."""
    first, second = gradient.to(accumulator_dtype(gradient.dtype)).chunk(2, dim=-1)
    left = first * cos + second * sin
    right = second * cos - first * sin
    return torch.cat((left, right), dim=-1)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        op_calls["rope"] += 1
        ctx.save_for_backward(positions, table)
        return ops.rope(query, key, positions, table)

    @staticmethod
    def backward(ctx: Any, dquery: torch.Tensor, dkey: torch.Tensor) -> tuple[Any, ...]:
        positions, table = ctx.saved_tensors
        cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        dquery, dkey = (rotate_back(g, cos, sin).to(g.dtype) for g in (dquery, dkey))
        return dquery, dkey, None, None


def rope(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.rope` with a gradient. query: [tokens, heads, head_dim]; key: [tokens, kv_heads,
    head_dim]; positions: [tokens] int; table: [max_position, head_dim] fp32."""
    return apply(_Rope, query, key, positions, table)
