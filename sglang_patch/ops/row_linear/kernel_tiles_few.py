"""Contract v1's products of at most 16 rows: whole subtrees of tiles side by side.

One program multiplies and adds one of PARTS subtrees for a block of columns; the last of a block to
arrive adds the parts, in tree order whatever the order of arrival.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..elementary_kernel import UNFUSED
from ..launch import launch
from ..linear.scratch import counters
from ..linear.table import FEW_ROWS, FewTile
from .kernel import add, carry


@triton.jit
def _tree(parts, offset, inside, stride, FIRST: tl.constexpr, COUNT: tl.constexpr):
    if COUNT == 1:
        # Written by another program: around this processor's first-level cache.
        return tl.load(
            parts + FIRST * stride + offset, mask=inside, other=0.0, cache_modifier=".cg"
        )
    else:
        left = _tree(parts, offset, inside, stride, FIRST, COUNT // 2)
        return add(left, _tree(parts, offset, inside, stride, FIRST + COUNT // 2, COUNT // 2))


# One binary for every number of rows.
@triton.jit(do_not_specialize=["rows"])
def tiles_few_kernel(
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
    RUN: tl.constexpr,
    LEVELS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out [rows, columns], rows <= BLOCK_M: PARTS subtrees of LEAVES = RUN * 2**LEVELS leaves, in
    out's dtype; x and weight contiguous in k."""
    block, part = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = part * (LEAVES * LEAF_WIDTH) + tl.arange(0, LEAF_WIDTH)
    row_inside, column_inside = (row < rows)[:, None], (column < columns)[None, :]
    x_block = x_ptr + row.to(tl.int64)[:, None] * x_row_stride + k[None, :]
    weight_block = weight_ptr + column.to(tl.int64)[None, :] * weight_row_stride + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), out_ptr.dtype.element_ty)
    pending = ()
    for _ in tl.static_range(LEVELS):
        pending = pending + (total,)  # type: ignore[assignment]
    for leaf in range(LEAVES):
        a = tl.load(x_block, mask=row_inside, other=0.0)
        b = tl.load(weight_block, mask=column_inside, other=0.0)
        sums = tl.dot(a, b, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), input_precision="ieee")
        value = sums.to(total.dtype)
        total = tl.where(leaf % RUN == 0, value, add(total, value))
        if leaf % RUN == RUN - 1:
            pending, total = carry(pending, total, leaf // RUN, LEVELS)
        x_block += LEAF_WIDTH
        weight_block += LEAF_WIDTH
    offset = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = row_inside & column_inside
    if PARTS == 1:
        tl.store(out_ptr + offset, total, mask=inside)
    else:
        stride = rows.to(tl.int64) * columns
        tl.store(parts_ptr + part * stride + offset, total, mask=inside)
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + block, 1, sem="acq_rel") == PARTS - 1:
            total = _tree(parts_ptr, offset, inside, stride, 0, PARTS)
            tl.store(out_ptr + offset, total, mask=inside)
            tl.store(arrivals_ptr + block, 0)


def launch_tiles_few(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    leaves: int,
    run: int,
    parts: int,
    tile: FewTile,
) -> None:
    """out [M, N] bf16 from x [M, K], weight [N, K] bf16, as `table.admits_tiles` requires.

    `parts`: a power of two, at most the number of runs.
    """
    (rows, k_size), columns = x.shape, weight.shape[0]
    blocks = triton.cdiv(columns, tile.block_n)
    part_sums = arrivals = out
    if parts > 1:
        part_sums = x.new_empty(parts * rows * columns)
        arrivals = counters(x, blocks)
    launch(
        tiles_few_kernel,
        (blocks, parts),
        (x, weight, out, part_sums, arrivals, rows, columns, x.stride(0), weight.stride(0)),
        {
            "LEAF_WIDTH": k_size // leaves, "LEAVES": leaves // parts, "RUN": run,
            "LEVELS": (leaves // run // parts).bit_length() - 1, "PARTS": parts,
            "BLOCK_M": FEW_ROWS, "BLOCK_N": tile.block_n, "num_warps": tile.warps,
            "num_stages": tile.stages, **UNFUSED,
        },
    )  # fmt: skip
