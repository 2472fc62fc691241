"""Linear layers whose K tensor parallelism cuts: o_proj, down_proj."""

from __future__ import annotations

from typing import Any

import torch

from .. import ops
from ..function import apply
from ..ops import RankGroup
from ..schema import RowReduction
from .products import (
    add_weight_gradient,
    block_count,
    on_tensor_cores,
    op_calls,
    operand,
    parameter_gradient,
    product,
    transposed_by_leaf,
)


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        reduction: RowReduction,
        ranks: RankGroup,
    ) -> torch.Tensor:
        op_calls[f"row_linear:{reduction.path}"] += 1
        ctx.save_for_backward(x, weight, bias)
        ctx.ranks = ranks
        return ops.row_linear(x, weight, bias, reduction=reduction, ranks=ranks)

    @staticmethod
    def backward(ctx: Any, out_gradient: torch.Tensor) -> tuple[Any, ...]:
        x, weight, bias = ctx.saved_tensors
        # Every rank holds the whole output, so its gradient is whole too: nothing to exchange.
        dy = operand(out_gradient.reshape(-1, weight.shape[0]))
        k_local, size = weight.shape[1], ctx.ranks.size
        blocks = block_count(k_local * size, size) // size
        width = k_local // blocks
        pieces = [slice(i * width, (i + 1) * width) for i in range(blocks)]
        dx = dweight = dbias = None
        gpu = on_tensor_cores(dy)
        if ctx.needs_input_grad[0] and gpu:
            from ..ops.linear.kernel import launch_linear

            # No rank cuts N, and a column's bits depend on no other: one leaf.
            dx = launch_linear(dy, transposed_by_leaf(weight), None, x.dtype).view(x.shape)
        elif ctx.needs_input_grad[0]:
            w = operand(weight)
            dx = torch.cat([product(dy, w[:, s]) for s in pieces], dim=1)
            dx = dx.to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            flat = operand(x.reshape(-1, k_local))

            def add_weight(target: torch.Tensor) -> None:
                if gpu:
                    add_weight_gradient(target, dy, flat)
                    return
                for s in pieces:
                    target[:, s] += product(dy.t(), flat[:, s])

            dweight = parameter_gradient(weight, add_weight)
        if bias is not None and ctx.needs_input_grad[2]:
            dbias = parameter_gradient(bias, lambda target: target.add_(dy.sum(0)))
        return dx, dweight, dbias, None, None


def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    reduction: RowReduction,
    ranks: RankGroup = RankGroup(),
) -> torch.Tensor:
    """`ops.row_linear` with a gradient. x: [..., K_local] bf16; weight: [N, K_local] bf16; bias:
    [N] or None, the same on every rank. Returns [..., N] bf16 on every rank.

    The loss after it is computed on every rank, so each rank's share of the gradient is its own.
    """
    return apply(_RowLinear, x, weight, bias, reduction, ranks)
