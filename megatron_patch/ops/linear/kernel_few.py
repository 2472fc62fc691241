"""Products of at most 16 rows: the weight is read once, by as many programs as there are leaves.

One program multiplies one leaf of a block of columns; the last of a block to arrive adds the
leaves, in tree order whatever the order of arrival: the same number as `row_linear_kernel`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..elementary_kernel import UNFUSED
from ..launch import launch
from .scratch import counters
from .table import FEW_ROWS, FewTile


@triton.jit
def _tree(parts, offset, inside, stride, FIRST: tl.constexpr, COUNT: tl.constexpr):
    if COUNT == 1:
        # Written by another program: around this processor's first-level cache.
        return tl.load(
            parts + FIRST * stride + offset, mask=inside, other=0.0, cache_modifier=".cg"
        )
    else:
        left = _tree(parts, offset, inside, stride, FIRST, COUNT // 2)
        return left + _tree(parts, offset, inside, stride, FIRST + COUNT // 2, COUNT // 2)


# One binary for every number of rows.
@triton.jit(do_not_specialize=["rows"])
def few_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    rows,
    columns,
    x_row_stride,
    weight_row_stride,
    LEAF_WIDTH: tl.constexpr,
    LEAVES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [rows, columns], rows <= BLOCK_M; x and weight contiguous in k."""
    block, leaf = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row_inside, column_inside = (row < rows)[:, None], (column < columns)[None, :]
    x_block = x_ptr + row.to(tl.int64)[:, None] * x_row_stride + leaf * LEAF_WIDTH + k[None, :]
    weight_block = weight_ptr + column.to(tl.int64)[None, :] * weight_row_stride
    weight_block += leaf * LEAF_WIDTH + k[:, None]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range((LEAF_WIDTH + BLOCK_K - 1) // BLOCK_K):
        if LEAF_WIDTH % BLOCK_K == 0:
            a = tl.load(x_block, mask=row_inside, other=0.0)
            b = tl.load(weight_block, mask=column_inside, other=0.0)
        else:
            inside = step * BLOCK_K + k < LEAF_WIDTH
            a = tl.load(x_block, mask=row_inside & inside[None, :], other=0.0)
            b = tl.load(weight_block, mask=column_inside & inside[:, None], other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
        x_block += BLOCK_K
        weight_block += BLOCK_K
    offset = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside_out = row_inside & column_inside
    if LEAVES == 1:
        tl.store(out_ptr + offset, accumulator.to(out_ptr.dtype.element_ty), mask=inside_out)
    else:
        stride = rows.to(tl.int64) * columns
        tl.store(parts_ptr + leaf * stride + offset, accumulator, mask=inside_out)
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + block, 1, sem="acq_rel") == LEAVES - 1:
            total = _tree(parts_ptr, offset, inside_out, stride, 0, LEAVES)
            tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=inside_out)
            tl.store(arrivals_ptr + block, 0)


def launch_few(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, leaves: int, tile: FewTile
) -> None:
    """out [M, N] bf16 or fp32 from x [M, K], weight [N, K] bf16, as `table.admits` requires."""
    (rows, k_size), columns = x.shape, weight.shape[0]
    blocks = triton.cdiv(columns, tile.block_n)
    parts = arrivals = out
    if leaves > 1:
        parts = x.new_empty(leaves * rows * columns, dtype=torch.float32)
        arrivals = counters(x, blocks)
    launch(
        few_kernel,
        (blocks, leaves),
        (x, weight, out, parts, arrivals, rows, columns, x.stride(0), weight.stride(0)),
        {
            "LEAF_WIDTH": k_size // leaves, "LEAVES": leaves, "BLOCK_M": FEW_ROWS,
            "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "num_warps": tile.warps,
            "num_stages": tile.stages, **UNFUSED,
        },
    )  # fmt: skip
