"""One rank's subtree of a row-parallel linear, in one pass over K.

Each leaf is one fp32 accumulator over increasing k, rounded to the leaf dtype. Leaves of a run are
added left to right; finished runs are added as a balanced tree whose waiting partial sums are a
binary counter: slot i holds the sum of 2**i runs until its right neighbour is complete. Every add
is rounded to the leaf dtype, so this is `schema.reduction.run_tree(num_leaves, run)`, add for add.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..elementary_kernel import UNFUSED
from ..formats import require
from ..launch import launch
from ..linear.kernel import (
    BLOCK_K,
    GROUP,
    GemmTile,
    launch_entry,
    program_tile,
    require_matrices,
    tile_for,
)
from ..linear.table import FewTile, Plan, admits
from .table import LEAF_WIDTH, FewPlan, choose

# As for `linear`, but up to three fp32 partial sums wait beside the accumulator (8 segments), or
# more in bf16: 64 x 128 over 8 warps takes 32 registers a thread for each.
TILES = (
    GemmTile(rows=16, block_m=16, block_n=64, warps=4, stages=4),
    GemmTile(rows=64, block_m=64, block_n=64, warps=8, stages=4),
    GemmTile(rows=0, block_m=64, block_n=128, warps=8, stages=4),
)


@triton.jit
def add(left, right):
    """`left + right` rounded to their dtype; for bf16 the fp32 sum changes no rounding."""
    return (left.to(tl.float32) + right.to(tl.float32)).to(left.dtype)


@triton.jit
def carry(pending, total, run, LEVELS: tl.constexpr):
    """Add run number `run` to the counter: returns (pending, carry out of the last slot)."""
    slots = ()
    carrying = run >= 0
    for level in tl.static_range(LEVELS):
        slot = pending[level]
        full = ((run >> level) & 1) == 1
        kept = tl.where(carrying & (not full), total, slot)
        slots = slots + (kept,)  # type: ignore[assignment]
        total = tl.where(carrying & full, add(slot, total), total)
        carrying = carrying & full
    return slots, total


# One binary for every number of rows, as in `linear`.
@triton.jit(do_not_specialize=["rows"])
def row_linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    columns,
    x_row_stride,
    x_k_stride,
    weight_row_stride,
    weight_k_stride,
    LEAF_WIDTH: tl.constexpr,
    RUN: tl.constexpr,
    LEVELS: tl.constexpr,
    LEAF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out [rows, columns]: 2**LEVELS runs of RUN leaves, each LEAF_WIDTH of K, added in LEAF."""
    STEPS: tl.constexpr = (LEAF_WIDTH + BLOCK_K - 1) // BLOCK_K
    block_m, block_n = program_tile(rows, columns, BLOCK_M, BLOCK_N, GROUP)
    row = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_block = x_ptr + row[:, None] * x_row_stride
    weight_block = weight_ptr + column[None, :] * weight_row_stride
    row_inside = (row < rows)[:, None]
    column_inside = (column < columns)[None, :]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_N), LEAF)
    pending = ()
    for _ in tl.static_range(LEVELS):
        empty = tl.zeros((BLOCK_M, BLOCK_N), LEAF)
        pending = pending + (empty,)  # type: ignore[assignment]
    # One loop over all steps of all leaves, so that loads run ahead across the end of a leaf.
    for step in range((RUN << LEVELS) * STEPS):
        leaf = step // STEPS
        within = (step % STEPS) * BLOCK_K + k
        offset = (leaf * LEAF_WIDTH + within).to(tl.int64)
        # Past the end of a leaf: zeros, for the next columns belong to the next leaf.
        inside = within < LEAF_WIDTH
        a = tl.load(
            x_block + offset[None, :] * x_k_stride, mask=row_inside & inside[None, :], other=0.0
        )
        b = tl.load(
            weight_block + offset[:, None] * weight_k_stride,
            mask=column_inside & inside[:, None],
            other=0.0,
        )
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
        if step % STEPS == STEPS - 1:
            value = accumulator.to(LEAF)
            accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            total = tl.where(leaf % RUN == 0, value, add(total, value))
            if leaf % RUN == RUN - 1:
                pending, total = carry(pending, total, leaf // RUN, LEVELS)
    out = out_ptr + row[:, None] * columns + column[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=row_inside & column_inside)


def launch_tiles_entry(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    leaves: int,
    run: int,
    tile: GemmTile | FewTile | FewPlan | Plan | None,
) -> bool:
    """Write out [M, N] bf16 by contract v1's entry given, or the table's choice; False: by the
    general kernel. x [M, K] and weight [N, K] bf16, K in `leaves` tiles in runs of `run`."""
    fits = x.shape[1] == leaves * LEAF_WIDTH and admits(x, weight, out.element_size(), 1)
    if isinstance(tile, GemmTile) or not fits:
        return False
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    entry = tile or choose(x.shape[0], weight.shape[0], leaves, run, processors)
    # Imported where a Hopper GPU is: Gluon's modules are of no use elsewhere.
    if isinstance(entry, FewPlan):
        from .kernel_tiles_few import launch_tiles_few

        launch_tiles_few(x, weight, out, leaves, run, entry.parts, entry.tile)
    elif entry is not None:
        assert isinstance(entry, Plan), entry
        from .kernel_tiles import launch_tiles

        launch_tiles(x, weight, out, leaves, run, entry)
    return entry is not None


def launch_row_linear_partial(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_leaves: int,
    run: int,
    leaf_dtype: torch.dtype,
    *,
    tile: GemmTile | FewTile | FewPlan | Plan | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K_local], weight [N, K_local] bf16, any strides -> [M, N] in `leaf_dtype`.

    `num_leaves` equal leaves, a power of two of runs of `run`; leaf_dtype bf16 or fp32. `out_dtype`
    rounds the root once more, for a rank that owns every leaf; `out` is where to write, contiguous.
    `tile` overrides the tables; conformance tests compare entries with it. Raises `ValueError` on
    others.
    """
    require_matrices("row_linear", x, weight)
    rows, k_size = x.shape
    columns = weight.shape[0]
    runs = num_leaves // run
    require(
        runs * run == num_leaves and runs & (runs - 1) == 0 and k_size % num_leaves == 0,
        f"row_linear kernel: K={k_size} in {num_leaves} leaves with runs of {run}: the leaves must "
        "divide K and be a power of two of runs",
    )
    require(
        leaf_dtype in (torch.bfloat16, torch.float32),
        f"row_linear kernel: leaf_dtype is {leaf_dtype}; it is bfloat16 or float32",
    )
    out_dtype = out_dtype or leaf_dtype
    if out is None:
        out = x.new_empty((rows, columns), dtype=out_dtype)
    require(
        out.shape == (rows, columns) and out.dtype == out_dtype and out.is_contiguous(),
        f"row_linear kernel: out is {out.dtype} {tuple(out.shape)}; it writes contiguous "
        f"{out_dtype} {(rows, columns)}",
    )
    if out.numel() == 0:
        return out
    # fp32 leaves, one or two a run, are a balanced tree, and one leaf is rounded once.
    balanced = leaf_dtype == torch.float32 and run <= 2
    if balanced or (num_leaves == 1 and out.dtype == leaf_dtype):
        if not isinstance(tile, FewPlan) and launch_entry(x, weight, out, num_leaves, tile):
            return out
    elif leaf_dtype == out.dtype and launch_tiles_entry(x, weight, out, num_leaves, run, tile):
        return out
    assert tile is None or isinstance(tile, GemmTile), tile
    tile = tile or tile_for(TILES, rows)
    launch(
        row_linear_kernel,
        (triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n),),
        (x, weight, out, rows, columns, *x.stride(), *weight.stride()),
        {
            "LEAF_WIDTH": k_size // num_leaves, "RUN": run, "LEVELS": runs.bit_length() - 1,
            "LEAF": tl.bfloat16 if leaf_dtype == torch.bfloat16 else tl.float32,
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": BLOCK_K, "GROUP": GROUP,
            "num_warps": tile.warps, "num_stages": tile.stages, **UNFUSED,
        },
    )  # fmt: skip
    return out
