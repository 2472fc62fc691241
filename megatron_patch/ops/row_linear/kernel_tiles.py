"""Contract v1's row-parallel linear on Hopper: bf16 tiles of K, runs, then a tree (Gluon).

As `linear.kernel_persistent`, one program a processor with one loading warp and two consumers, and
one loader for both. A leaf is a tile of K: its fp32 accumulator is rounded to bf16 and added to its
run in registers; finished runs wait in bf16, half the space of fp32. Leaves are short, so the two
consumers take turns at the tensor core: while one multiplies its leaf, the other adds its last one.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..elementary_kernel import UNFUSED
from ..launch import launch
from ..linear.kernel_leaves import (
    accumulator_layout,
    carry,
    count,
    gather,
    offsets,
    pack,
    packed_layout,
    plus,
    unpack,
)
from ..linear.kernel_persistent import operand_layout, output_box
from ..linear.kernel_roles import load, origin, store, unit_of
from ..linear.scratch import counters
from ..linear.table import Plan

# Registers a thread, as in `kernel_persistent`.
_AT_LAUNCH: Final = 168
_CONSUMER = gl.constexpr(240)
_LOADER = gl.constexpr(24)


@gluon.jit
def pack_pairs(sums, N: gl.constexpr):
    """An fp32 accumulator [64, N] rounded to bf16, two a word: int32 [N / 16, 128 threads, 4]."""
    first, second = pack(sums, N).reshape([N // 8, 128, 2, 2]).split()
    pairs = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], gl.int32, True, 1
    )
    pairs = pairs.reshape([N // 16, 2, 128, 2]).permute([0, 2, 1, 3]).reshape([N // 16, 128, 4])
    return gl.convert_layout(pairs, packed_layout(), assert_trivial=True)


@gluon.jit
def unpack_pairs(pairs, N: gl.constexpr):
    """The bf16 [64, N] of `pack_pairs`, in the accumulator's layout."""
    pairs = pairs.reshape([N // 16, 128, 2, 2]).permute([0, 2, 1, 3]).reshape([N // 8, 128, 2])
    first = (pairs & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
    second = (pairs >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return unpack(gl.join(first, second).reshape([N // 8, 128, 4]), N)


@gluon.jit
def _leaf(
    step, leaf, ring, turns, buffers, W: gl.constexpr, STAGES: gl.constexpr, STEPS: gl.constexpr,
    BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """A consumer's next leaf, rounded to bf16, as `pack_pairs` has it."""
    empty, full = ring
    x_buffers, weight_buffers = buffers[0], buffers[1]
    # Narrower tiles wait for their operands, not for the tensor core.
    TURNS: gl.constexpr = BLOCK_N >= 128 and COLUMNS == BLOCK_N
    sums = gl.zeros([64, BLOCK_N], gl.float32, layout=accumulator_layout(BLOCK_N))
    for k in gl.static_range(STEPS):
        stage = (step + k) % STAGES
        mbarrier.wait(full.index(stage), ((step + k) // STAGES) & 1)
        if TURNS and k == 0:
            # The first consumer begins; each hands on once half of its leaf is queued.
            mbarrier.wait(turns.index(W), (leaf & 1) ^ (1 - W))
        if COLUMNS > BLOCK_N:
            x = x_buffers.index(stage)
            weight = weight_buffers.index(stage).slice(BLOCK_N * W, BLOCK_N, dim=0)
        else:
            x = x_buffers.index(stage * 2 + W)
            weight = weight_buffers.index(stage)
        sums = warpgroup_mma(x, weight.permute([1, 0]), sums, is_async=True, use_acc=k > 0)
        if TURNS and k == (STEPS - 1) // 2:
            mbarrier.arrive(turns.index(1 - W), count=1)
    sums = warpgroup_mma_wait(0, deps=[sums])
    for k in gl.static_range(STEPS):
        mbarrier.arrive(empty.index((step + k) % STAGES), count=1)
    return step + STEPS, leaf + 1, pack_pairs(sums, BLOCK_N)


@gluon.jit
def _run(
    step, leaf, ring, turns, buffers, RUN: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr,
    STEPS: gl.constexpr, BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """RUN leaves added left to right."""
    step, leaf, total = _leaf(step, leaf, ring, turns, buffers, W, STAGES, STEPS, BLOCK_N, COLUMNS)
    if RUN > 1:
        for _ in range(RUN - 1):
            step, leaf, value = _leaf(
                step, leaf, ring, turns, buffers, W, STAGES, STEPS, BLOCK_N, COLUMNS
            )
            total = plus(total, value)
    return step, leaf, total


@gluon.jit
def consume(
    io, ring, buffers, work, turns, RUN: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr,
    STEPS: gl.constexpr, BLOCK_N: gl.constexpr, LEAVES: gl.constexpr, PLACES: gl.constexpr,
    PARTS: gl.constexpr, MIXED: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """One of two: its half of each tile, leaf after leaf; arguments as in `linear.kernel_roles`."""
    out, workspace, parts, arrivals = io[3], io[4], io[5], io[6]
    waiting, staging = buffers[3], buffers[4]
    units, whole, _, blocks = work
    SIZE: gl.constexpr = 32 * BLOCK_N
    ROWS: gl.constexpr = BLOCK_N // 16
    HALVED: gl.constexpr = COLUMNS > BLOCK_N
    workspace += (gl.program_id(0).to(gl.int64) * 2 + W) * (SIZE * count(PLACES, "W"))
    step = 0
    leaf = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        tile, first, leaves, part = unit_of(unit, whole, LEAVES, PARTS, MIXED)
        total = gl.zeros([ROWS, 128, 4], gl.int32, layout=packed_layout())
        held = (total, total, total)
        if len(PLACES) == 0:
            step, leaf, total = _run(
                step, leaf, ring, turns, buffers, RUN, W, STAGES, STEPS, BLOCK_N, COLUMNS
            )
        else:
            runs = leaves // RUN
            for run in range(runs):
                step, leaf, total = _run(
                    step, leaf, ring, turns, buffers, RUN, W, STAGES, STEPS, BLOCK_N, COLUMNS
                )
                total, held = carry(run, runs, total, held, waiting, workspace, W, PLACES, 0)
        last = unit >= 0
        if PARTS > 1:
            split = tile - whole
            if split >= 0:
                mine = parts + split.to(gl.int64) * (PARTS * 2 * SIZE) + W * SIZE
                gl.store(mine + part * (2 * SIZE) + offsets(ROWS), total)
                gl.thread_barrier()
                arrival = arrivals + split * 2 + W
                last = gl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == PARTS - 1
                if last:
                    total = gather(mine, 2 * SIZE, PARTS, ROWS)
                    gl.store(arrival, 0)
        if last:
            row, column = origin(tile, blocks, 64 if HALVED else 128, COLUMNS)
            if HALVED:
                column += W * BLOCK_N
            else:
                row += W * 64
            store(unpack_pairs(total, BLOCK_N), out, staging, row, column, 0, W, "own")
    tma.store_wait(0)


# One binary for every number of rows: only the sizes of loops depend on it.
@gluon.jit(do_not_specialize=["units", "whole", "steps", "blocks_m", "blocks_n"])
def tiles_kernel(
    x,
    weight,
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
    STEPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    LEAVES: gl.constexpr,
    RUN: gl.constexpr,
    PLACES: gl.constexpr,
    PARTS: gl.constexpr,
    MIXED: gl.constexpr,
    COLUMNS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """out [M, N] bf16 = LEAVES products of x [M, K] and weight [N, K], each rounded to bf16: RUN
    at a time left to right, the runs as a balanced tree."""
    K: gl.constexpr = x.block_type.shape[1]
    HALVED: gl.constexpr = COLUMNS > BLOCK_N
    x_buffers = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES if HALVED else 2 * STAGES, 64, K], x.layout
    )
    weight_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLUMNS, K], weight.layout)
    staging = gl.allocate_shared_memory(gl.bfloat16, [4] + out.block_type.shape, out.layout)
    if count(PLACES, "S") > 0:
        waiting = gl.allocate_shared_memory(
            gl.int32,
            [2 * count(PLACES, "S"), BLOCK_N // 16, 128, 4],
            gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]),
        )
    else:
        waiting = staging
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(empty.index(stage), count=2)
        mbarrier.init(full.index(stage), count=1)
    for consumer in gl.static_range(2):
        mbarrier.init(turns.index(consumer), count=1)
    io = (x, weight, weight, out, workspace, parts, arrivals)
    ring = (empty, full)
    buffers = (x_buffers, weight_buffers, weight_buffers, waiting, staging)
    work = (units, whole, steps, (blocks_m, blocks_n))
    gl.warp_specialize(
        [
            (consume, (io, ring, buffers, work, turns, RUN, 0, STAGES, STEPS, BLOCK_N, LEAVES,
                       PLACES, PARTS, MIXED, COLUMNS)),
            (consume, (io, ring, buffers, work, turns, RUN, 1, STAGES, STEPS, BLOCK_N, LEAVES,
                       PLACES, PARTS, MIXED, COLUMNS)),
            (load, (io, ring, buffers, work, 0, STAGES, BLOCK_N, 0, LEAVES, PLACES, "own", PARTS,
                    MIXED, COLUMNS)),
        ],
        [4, 1],
        [_CONSUMER, _LOADER],
    )  # fmt: skip


def launch_tiles(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, leaves: int, run: int, plan: Plan
) -> None:
    """out [M, N] bf16 from x [M, K], weight [N, K] bf16, as `table.admits_tiles` requires."""
    (rows, k_size), columns = x.shape, weight.shape[0]
    tile, levels = plan.tile, plan.levels
    layout = operand_layout(levels.block_k)
    # A block below the last row costs the copy engine more than rows that are there.
    box_rows = tile.rows
    while tile.halved and box_rows > 8 and rows <= box_rows // 2:
        box_rows //= 2
    width, out_layout = output_box(tile.block_n, 16)
    size = 32 * tile.block_n
    workspace = parts = arrivals = out
    if "W" in levels.places:
        workspace = x.new_empty(
            plan.programs * 2 * size * levels.places.count("W"), dtype=torch.int32
        )
    if plan.parts > 1:
        parts = x.new_empty(plan.split * plan.parts * 2 * size, dtype=torch.int32)
        arrivals = counters(x, plan.split * 2)
    steps = k_size // leaves // levels.block_k
    launch(
        tiles_kernel,
        (plan.programs,),
        (
            TensorDescriptor.from_tensor(x, [box_rows, levels.block_k], layout),
            TensorDescriptor.from_tensor(weight, [tile.columns, levels.block_k], layout),
            TensorDescriptor.from_tensor(out, [64, width], out_layout),
            workspace, parts, arrivals, plan.units, plan.tiles - plan.split, steps,
            triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns),
        ),
        {
            "STAGES": levels.stages, "STEPS": steps, "BLOCK_N": tile.block_n, "LEAVES": leaves,
            "RUN": run, "PLACES": levels.places, "PARTS": plan.parts, "MIXED": plan.mixed,
            "COLUMNS": tile.columns, "num_warps": 4, "maxnreg": _AT_LAUNCH, **UNFUSED,
        },
    )  # fmt: skip
