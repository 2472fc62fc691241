"""Products on Hopper: one program a processor, that takes unit after unit (Gluon).

Same bits as `kernel.linear_kernel` and `row_linear_kernel`: the tensor core adds groups of k in
increasing order for every shape of tile, and the leaves are added in the order of the schema
(`miles conform` proves each entry of the table on the GPU at hand).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..elementary_kernel import UNFUSED
from ..launch import launch
from .kernel_leaves import count
from .kernel_roles import consume, load
from .scratch import counters, make_context_current
from .table import Plan

# Registers a thread. Two consumers take what the loader leaves of 168 at launch: 240 each.
_AT_LAUNCH: Final = 168
_CONSUMER = gl.constexpr(240)
_LOADER = gl.constexpr(24)


# One binary for every number of rows: only the sizes of loops depend on it.
@gluon.jit(do_not_specialize=["units", "whole", "steps", "blocks_m", "blocks_n"])
def persistent_kernel(
    x,
    weight,
    extra,
    out,
    workspace,
    parts,
    arrivals,
    units,
    whole,
    steps,
    blocks_m,
    blocks_n,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    EXTRA_N: gl.constexpr,
    LEAVES: gl.constexpr,
    PLACES: gl.constexpr,
    STAGING: gl.constexpr,
    PARTS: gl.constexpr,
    MIXED: gl.constexpr,
    COLUMNS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """out [M, N] = the balanced tree over LEAVES products of x [M, K] and weight [N, K]."""
    K: gl.constexpr = x.block_type.shape[1]
    HALVED: gl.constexpr = COLUMNS > BLOCK_N + EXTRA_N
    # Each consumer has 64 rows of x of its own, or both have the same 64 and half the columns.
    x_buffers = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES if HALVED else 2 * STAGES, 64, K], x.layout
    )
    weight_buffers = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, COLUMNS - EXTRA_N, K], weight.layout
    )
    if EXTRA_N:
        extra_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, EXTRA_N, K], extra.layout)
    else:
        extra_buffers = weight_buffers
    if count(PLACES, "S") > 0:
        waiting = gl.allocate_shared_memory(
            gl.float32,
            [2 * count(PLACES, "S"), BLOCK_N // 8, 128, 4],
            gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]),
        )
    else:
        waiting = x_buffers
    if STAGING == "own":
        staging = gl.allocate_shared_memory(out.dtype, [4] + out.block_type.shape, out.layout)
    else:
        staging = x_buffers
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(empty.index(stage), count=2)
        mbarrier.init(full.index(stage), count=1)
    io = (x, weight, extra, out, workspace, parts, arrivals)
    ring = (empty, full)
    buffers = (x_buffers, weight_buffers, extra_buffers, waiting, staging)
    work = (units, whole, steps, (blocks_m, blocks_n))
    gl.warp_specialize(
        [
            (consume, (io, ring, buffers, work, 0, STAGES, BLOCK_N, EXTRA_N, LEAVES, PLACES,
                       STAGING, PARTS, MIXED, COLUMNS)),
            (consume, (io, ring, buffers, work, 1, STAGES, BLOCK_N, EXTRA_N, LEAVES, PLACES,
                       STAGING, PARTS, MIXED, COLUMNS)),
            (load, (io, ring, buffers, work, 0, STAGES, BLOCK_N, EXTRA_N, LEAVES, PLACES,
                    STAGING, PARTS, MIXED, COLUMNS)),
        ],
        [4, 1],
        [_CONSUMER, _LOADER],
    )  # fmt: skip


@lru_cache
def operand_layout(block_k: int) -> gl.NVMMASharedLayout:
    """bf16 rows of `block_k`, swizzled over 128 bytes (64 at block_k 32) as wgmma reads them."""
    return gl.NVMMASharedLayout(min(128, 2 * block_k), 16, rank=2)


@lru_cache
def output_box(block_n: int, bits: int) -> tuple[int, gl.NVMMASharedLayout]:
    """Columns and layout of one stored piece: at most 128 bytes a row."""
    width = min(block_n, 1024 // bits)
    swizzle = width * bits // 8
    return width, gl.NVMMASharedLayout(swizzle if swizzle >= 32 else 0, bits, rank=2)


def launch_persistent(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, leaves: int, plan: Plan
) -> None:
    """out [M, N] bf16 or fp32 from x [M, K], weight [N, K] bf16, as `table.admits` requires."""
    make_context_current(x)
    (rows, k_size), columns = x.shape, weight.shape[0]
    tile, levels = plan.tile, plan.levels
    layout = operand_layout(levels.block_k)
    # A block below the last row costs the copy engine more than rows that are there.
    box_rows = tile.rows
    while tile.halved and box_rows > 8 and rows <= box_rows // 2:
        box_rows //= 2
    width, out_layout = output_box(tile.block_n, out.element_size() * 8)
    x_blocks = TensorDescriptor.from_tensor(x, [box_rows, levels.block_k], layout)
    weight_blocks = TensorDescriptor.from_tensor(
        weight, [tile.columns - tile.extra_n, levels.block_k], layout
    )
    extra_blocks = weight_blocks
    if tile.extra_n:
        extra_blocks = TensorDescriptor.from_tensor(weight, [tile.extra_n, levels.block_k], layout)
    size = 64 * tile.block_n
    workspace = parts = arrivals = out
    if "W" in levels.places:
        held = plan.programs * 2 * size * levels.places.count("W")
        workspace = x.new_empty(held, dtype=torch.float32)
    if plan.parts > 1:
        parts = x.new_empty(plan.split * plan.parts * 2 * size, dtype=torch.float32)
        arrivals = counters(x, plan.split * 2)
    launch(
        persistent_kernel,
        (plan.programs,),
        (
            x_blocks, weight_blocks, extra_blocks,
            TensorDescriptor.from_tensor(out, [64, width], out_layout),
            workspace, parts, arrivals,
            plan.units, plan.tiles - plan.split, k_size // leaves // levels.block_k,
            triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns),
        ),
        {
            "STAGES": levels.stages, "BLOCK_N": tile.block_n, "EXTRA_N": tile.extra_n,
            "LEAVES": leaves, "PLACES": levels.places, "STAGING": levels.staging,
            "PARTS": plan.parts, "MIXED": plan.mixed, "COLUMNS": tile.columns, "num_warps": 4,
            "maxnreg": _AT_LAUNCH, **UNFUSED,
        },
    )  # fmt: skip
