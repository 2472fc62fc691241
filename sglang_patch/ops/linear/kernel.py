"""Batch-invariant linear: one fp32 accumulator an output element, k increasing, one rounding.

A row's bits must not depend on how many rows there are, while the fast tile does. Tiles may be
chosen by M because they share the order of k: the tensor core adds groups of k in increasing order
whatever the tile's height and width, as measured for the shapes in `TILES` (bit-equal on an H200
over BLOCK_M 16 to 256, BLOCK_N 64 to 256, 4 to 16 warps). BLOCK_K is one number for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from ..elementary_kernel import UNFUSED
from ..formats import require
from ..launch import launch
from .table import FewTile, Plan, admits, choose

# 64 bf16 are the 128 bytes of one shared-memory swizzle atom.
BLOCK_K: Final = 64
# Row blocks that walk the columns together, so that their x and the weight stay in the L2 cache.
GROUP: Final = 8


@dataclass(frozen=True, slots=True)
class GemmTile:
    """Launch constants for products of at most `rows` rows (0: any number)."""

    rows: int
    block_m: int
    block_n: int
    warps: int
    stages: int


# Few rows read the weight once and want many programs; many rows want the largest tile whose fp32
# accumulator (64 registers a thread at 128 x 128 over 8 warps) leaves room for the loads.
TILES = (
    GemmTile(rows=16, block_m=16, block_n=64, warps=4, stages=4),
    GemmTile(rows=64, block_m=64, block_n=64, warps=4, stages=4),
    GemmTile(rows=0, block_m=128, block_n=128, warps=8, stages=4),
)


def tile_for(tiles: tuple[GemmTile, ...], rows: int) -> GemmTile:
    """The first tile that takes `rows` rows; the last of a table takes any number."""
    assert tiles[-1].rows == 0, tiles
    return next(t for t in tiles if t.rows == 0 or rows <= t.rows)


def require_matrices(name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    """`ValueError` unless x [M, K] and weight [N, K] are bf16: another dtype is another number
    (fp32 would pass through TF32)."""
    require(
        x.dtype == weight.dtype == torch.bfloat16 and x.dim() == weight.dim() == 2,
        f"{name} kernel: x is {x.dtype} {tuple(x.shape)} and weight {weight.dtype} "
        f"{tuple(weight.shape)}; it takes bfloat16 [M, K] and [N, K] "
        "(fp64 gradchecks run on the CPU reference)",
    )


@triton.jit
def program_tile(rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """This program's block row and block column, GROUP block rows at a time; touches no bit."""
    program = tl.program_id(0)
    blocks_m = tl.cdiv(rows, BLOCK_M)
    per_group = GROUP * tl.cdiv(columns, BLOCK_N)
    first = (program // per_group) * GROUP
    height = tl.minimum(blocks_m - first, GROUP)
    within = program % per_group
    return first + within % height, within // height


def launch_entry(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    leaves: int,
    tile: GemmTile | FewTile | Plan | None,
) -> bool:
    """Write out [M, N] by the entry given, or the table's choice; False: by the general kernel.

    x [M, K] and weight [N, K] bf16, K in equal leaves added as a balanced tree.
    """
    if isinstance(tile, GemmTile) or not admits(x, weight, out.element_size(), leaves):
        return False
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    (rows, k_size), columns = x.shape, weight.shape[0]
    entry = tile or choose(rows, columns, k_size, leaves, processors)
    # Imported where a Hopper GPU is: Gluon's modules are of no use elsewhere.
    if isinstance(entry, FewTile):
        from .kernel_few import launch_few

        launch_few(x, weight, out, leaves, entry)
    elif entry is not None:
        from .kernel_persistent import launch_persistent

        launch_persistent(x, weight, out, leaves, entry)
    return entry is not None


# One binary for every number of rows: a compiler that knew M (1, or a multiple of 16) could differ.
@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    columns,
    k_size,
    x_row_stride,
    x_k_stride,
    weight_row_stride,
    weight_k_stride,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out [rows, columns] = x [rows, k_size] @ weight [columns, k_size].T (+ bias in fp32)."""
    block_m, block_n = program_tile(rows, columns, BLOCK_M, BLOCK_N, GROUP)
    row = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    x_block = x_ptr + row[:, None] * x_row_stride + k[None, :] * x_k_stride
    weight_block = weight_ptr + column[None, :] * weight_row_stride + k[:, None] * weight_k_stride
    row_inside = (row < rows)[:, None]
    column_inside = (column < columns)[None, :]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(k_size, BLOCK_K)):
        if EVEN_K:
            a = tl.load(x_block, mask=row_inside, other=0.0)
            b = tl.load(weight_block, mask=column_inside, other=0.0)
        else:
            # Zeros past the end of K: a product with zero leaves the accumulator as it is.
            k_inside = step * BLOCK_K + k < k_size
            a = tl.load(x_block, mask=row_inside & k_inside[None, :], other=0.0)
            b = tl.load(weight_block, mask=column_inside & k_inside[:, None], other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
        x_block += BLOCK_K * x_k_stride
        weight_block += BLOCK_K * weight_k_stride
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        accumulator = accumulator + bias[None, :]
    out = out_ptr + row[:, None] * columns + column[None, :]
    tl.store(out, accumulator.to(out_ptr.dtype.element_ty), mask=row_inside & column_inside)


def launch_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    tile: GemmTile | FewTile | Plan | None = None,
) -> torch.Tensor:
    """See `op.linear`; x [M, K], weight [N, K] bf16, any strides -> [M, N] bf16 or fp32.

    `tile` overrides the tables; conformance tests compare entries with it. Raises `ValueError` on
    a dtype that the kernel does not take.
    """
    require_matrices("linear", x, weight)
    require(
        out_dtype in (torch.bfloat16, torch.float32),
        f"linear kernel: out_dtype is {out_dtype}; it writes bfloat16 or float32",
    )
    rows, k_size = x.shape
    columns = weight.shape[0]
    out = x.new_empty((rows, columns), dtype=out_dtype)
    if out.numel() == 0:
        return out
    if bias is None and launch_entry(x, weight, out, 1, tile):
        return out
    assert tile is None or isinstance(tile, GemmTile), tile
    tile = tile or tile_for(TILES, rows)
    launch(
        linear_kernel,
        (triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n),),
        (
            x, weight, None if bias is None else bias.contiguous(), out, rows, columns, k_size,
            *x.stride(), *weight.stride(),
        ),
        {
            "HAS_BIAS": bias is not None, "EVEN_K": k_size % BLOCK_K == 0,
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": BLOCK_K, "GROUP": GROUP,
            "num_warps": tile.warps, "num_stages": tile.stages, **UNFUSED,
        },
    )  # fmt: skip
    return out
