"""Linear layers whose output columns tensor parallelism cuts: qkv, gate_up, lm_head."""

from __future__ import annotations

from typing import Any

import torch

from .. import ops
from ..function import apply
from ..ops import RankGroup
from .products import (
    add_weight_gradient,
    block_count,
    by_leaf,
    on_tensor_cores,
    op_calls,
    operand,
    parameter_gradient,
    product,
    transposed_by_leaf,
    tree,
)


def _block_rows(local_rows: int, stride: int, blocks: int) -> list[list[slice]]:
    """Rows of the local weight that belong to each block: one slice in each of `stride` parts."""
    part = local_rows // stride
    width = part // blocks
    return [
        [slice(j * part + i * width, j * part + (i + 1) * width) for j in range(stride)]
        for i in range(blocks)
    ]


def _input_gradient(
    dy: torch.Tensor, weight: torch.Tensor, stride: int, blocks: int, ranks: RankGroup
) -> torch.Tensor:
    """dy [rows, N_local] @ weight [N_local, K] on a GPU: N is cut into leaves and over the ranks
    like the K of a row-parallel linear, so its kernel makes one rank's subtree."""
    from ..ops.row_linear.kernel import launch_row_linear_partial

    assert blocks & (blocks - 1) == 0, blocks
    alone = ranks.size == 1
    total = launch_row_linear_partial(
        by_leaf(dy, stride, blocks),
        transposed_by_leaf(weight, stride, blocks),
        blocks,
        min(blocks, 2),
        torch.float32,
        out_dtype=weight.dtype if alone else torch.float32,
    )
    return total if alone else ops.tree_all_reduce(total, ranks).to(weight.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ranks: RankGroup,
        stride: int,
        out_dtype: str,
    ) -> torch.Tensor:
        op_calls["linear"] += 1
        ctx.save_for_backward(x, weight, bias)
        ctx.ranks, ctx.stride = ranks, stride
        return ops.linear(x, weight, bias, out_dtype=out_dtype)

    @staticmethod
    def backward(ctx: Any, out_gradient: torch.Tensor) -> tuple[Any, ...]:
        x, weight, bias = ctx.saved_tensors
        ranks: RankGroup = ctx.ranks
        rows = weight.shape[0]
        # fp32 logit gradients are rounded like every other activation gradient.
        dy = operand(out_gradient.reshape(-1, rows).to(weight.dtype))
        blocks = block_count(rows * ranks.size // ctx.stride, ranks.size) // ranks.size
        pieces = _block_rows(rows, ctx.stride, blocks)
        dx = dweight = dbias = None
        gpu = on_tensor_cores(dy)
        if ctx.needs_input_grad[0] and gpu:
            dx = _input_gradient(dy, weight, ctx.stride, blocks, ranks).view(x.shape)
        elif ctx.needs_input_grad[0]:
            w = operand(weight)

            def leaf(i: int) -> torch.Tensor:
                columns = torch.cat([dy[:, s] for s in pieces[i]], dim=1)
                return product(columns, torch.cat([w[s] for s in pieces[i]]))

            total = ops.tree_all_reduce(tree(blocks, leaf), ranks)
            dx = total.to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            flat = operand(x.reshape(-1, x.shape[-1]))

            def add_weight(target: torch.Tensor) -> None:
                if gpu:
                    add_weight_gradient(target, dy, flat)
                    return
                for piece in pieces:
                    for s in piece:
                        target[s] += product(dy[:, s].t(), flat)

            dweight = parameter_gradient(weight, add_weight)
        if bias is not None and ctx.needs_input_grad[2]:
            dbias = parameter_gradient(bias, lambda target: target.add_(dy.sum(0)))
        return dx, dweight, dbias, None, None, None


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ranks: RankGroup = RankGroup(),
    stride: int = 1,
    out_dtype: str = "bfloat16",
) -> torch.Tensor:
    """`ops.linear` with a gradient. x: [..., K] bf16, the same on every rank of `ranks`; weight:
    [N_local, K] bf16, this rank's rows; bias: [N_local] or None. Returns [..., N_local].

    Backward: the input's gradient is summed over the ranks in fp32, as one tree over blocks of the
    global N, and rounded once. `stride` is the number of matrices fused in the rows (2: gate, up).
    """
    return apply(_Linear, x, weight, bias, ranks, stride, out_dtype)
