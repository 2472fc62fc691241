"""The two roles in a program of `kernel_persistent`: a loading warp, two multiplying warp groups.

The loader fills a ring of shared-memory stages by TMA and runs ahead across leaves and tiles; each
consumer multiplies by wgmma, k increasing, and adds its finished leaves as `kernel_leaves` says,
while the other one keeps the tensor core busy. A unit of work is a tile, or one of PARTS whole
subtrees of it: then the last to arrive adds the parts, in tree order whatever the order of arrival.

Arguments of both roles:
    io: descriptors of x, weight, its extra columns and out; workspace, parts and arrivals pointers
    ring: barriers `empty` and `full`, one of each a stage
    buffers: shared memory of x, weight, extra columns, waiting sums and staging
    work: number of units, tiles that are one unit, steps of k a leaf, (block rows, block columns)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .kernel_leaves import (
    accumulator_layout,
    carry,
    count,
    gather,
    in_registers,
    offsets,
    pack,
    packed_layout,
    unpack,
)

# Row blocks that walk the columns together, so that their x and the weight stay in the L2 cache.
_GROUP = gl.constexpr(8)


@gluon.jit
def unit_of(unit, whole, LEAVES: gl.constexpr, PARTS: gl.constexpr, MIXED: gl.constexpr):
    """(tile, first leaf, leaves, part): the tiles from `whole` on are PARTS units each."""
    LESS: gl.constexpr = LEAVES // PARTS
    if PARTS == 1:
        return unit, 0, LEAVES, 0
    else:
        part = (unit - whole) % PARTS
        tile = whole + (unit - whole) // PARTS
        if MIXED:
            split = unit >= whole
            part = gl.where(split, part, 0)
            tile = gl.where(split, tile, unit)
            return tile, part * LESS, gl.where(split, LESS, LEAVES), part
        else:
            return tile, part * LESS, LESS, part


@gluon.jit
def origin(tile, blocks, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """First row and column of a tile, _GROUP block rows at a time."""
    blocks_m, blocks_n = blocks
    per_group = _GROUP * blocks_n
    first = (tile // per_group) * _GROUP
    height = gl.minimum(blocks_m - first, _GROUP)
    within = tile % per_group
    return (first + within % height) * ROWS, (within // height) * COLUMNS


@gluon.jit
def load(
    io, ring, buffers, work, W: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    EXTRA_N: gl.constexpr, LEAVES: gl.constexpr, PLACES: gl.constexpr, STAGING: gl.constexpr,
    PARTS: gl.constexpr, MIXED: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    x, weight, extra = io[0], io[1], io[2]
    empty, full = ring
    x_buffers, weight_buffers, extra_buffers = buffers[0], buffers[1], buffers[2]
    units, whole, steps, blocks = work
    K: gl.constexpr = x.block_type.shape[1]
    HEIGHT: gl.constexpr = 64 if COLUMNS > BLOCK_N + EXTRA_N else 128
    X_ROWS: gl.constexpr = x.block_type.shape[0]
    BYTES: gl.constexpr = (X_ROWS + COLUMNS) * K * 2
    if HEIGHT == 128:
        x_buffers = x_buffers._reinterpret(x.dtype, [STAGES, 128, K], x.layout)
    step = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        tile, first, leaves, part = unit_of(unit, whole, LEAVES, PARTS, MIXED)
        row, column = origin(tile, blocks, HEIGHT, COLUMNS)
        for k in range(first * steps, (first + leaves) * steps):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            arrived = full.index(stage)
            mbarrier.expect(arrived, BYTES)
            x_buffer = x_buffers.index(stage)
            if X_ROWS < HEIGHT:
                # Fewer rows than wgmma takes: what lies below them reaches no stored row.
                x_buffer = x_buffer.slice(0, X_ROWS, dim=0)
            tma.async_copy_global_to_shared(x, [row, k * K], arrived, x_buffer)
            tma.async_copy_global_to_shared(
                weight, [column, k * K], arrived, weight_buffers.index(stage)
            )
            if EXTRA_N:
                tma.async_copy_global_to_shared(
                    extra, [column + BLOCK_N, k * K], arrived, extra_buffers.index(stage)
                )
            step += 1


@gluon.jit
def _multiply(
    step, ring, buffers, steps, W: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    EXTRA_N: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """One leaf of a consumer: (step, accumulator [64, BLOCK_N], extra [64, EXTRA_N])."""
    empty, full = ring
    x_buffers, weight_buffers, extra_buffers = buffers[0], buffers[1], buffers[2]
    sums = gl.zeros([64, BLOCK_N], gl.float32, layout=accumulator_layout(BLOCK_N))
    more = gl.zeros([64, max(EXTRA_N, 8)], gl.float32, layout=accumulator_layout(max(EXTRA_N, 8)))
    for k in range(steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        if COLUMNS > BLOCK_N + EXTRA_N:
            x = x_buffers.index(stage)
            weight = weight_buffers.index(stage).slice(BLOCK_N * W, BLOCK_N, dim=0)
        else:
            x = x_buffers.index(stage * 2 + W)
            weight = weight_buffers.index(stage)
        sums = warpgroup_mma(x, weight.permute([1, 0]), sums, is_async=True, use_acc=k > 0)
        if EXTRA_N:
            extra = extra_buffers.index(stage).permute([1, 0])
            more = warpgroup_mma(x, extra, more, is_async=True, use_acc=k > 0)
            sums, more = warpgroup_mma_wait(2, deps=[sums, more])
        else:
            sums = warpgroup_mma_wait(1, deps=[sums])
        # The step before this one has been multiplied.
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
        step += 1
    if EXTRA_N:
        sums, more = warpgroup_mma_wait(0, deps=[sums, more])
    else:
        sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return step, sums, more


@gluon.jit
def store(sums, out, buffers, row, column, piece, W: gl.constexpr, STAGING: gl.constexpr):
    """Round and store [64, N] through the staging buffers, a piece at a time; returns pieces."""
    WIDTH: gl.constexpr = out.block_type.shape[1]
    N: gl.constexpr = sums.shape[1]
    if N > WIDTH:
        left, right = sums.reshape([64, 2, N // 2]).permute([0, 2, 1]).split()
        piece = store(left, out, buffers, row, column, piece, W, STAGING)
        return store(right, out, buffers, row, column + N // 2, piece, W, STAGING)
    else:
        NUMBER: gl.constexpr = 4 if STAGING == "waiting" else buffers.shape[0] // 2
        if STAGING == "x":
            # One tile a program: this consumer's rows of x have all been read.
            buffer = buffers.index(piece % NUMBER * 2 + W)
            buffer = buffer._reinterpret(out.dtype, [64, WIDTH], out.layout)
        elif STAGING == "waiting":
            buffer = buffers.index(piece % NUMBER)
        else:
            buffer = buffers.index(W * NUMBER + piece % NUMBER)
        tma.store_wait(NUMBER - 1)
        gl.thread_barrier()
        buffer.store(sums.to(out.dtype))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out, [row, column], buffer)
        return piece + 1


@gluon.jit
def consume(
    io, ring, buffers, work, W: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    EXTRA_N: gl.constexpr, LEAVES: gl.constexpr, PLACES: gl.constexpr, STAGING: gl.constexpr,
    PARTS: gl.constexpr, MIXED: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    out, workspace, parts, arrivals = io[3], io[4], io[5], io[6]
    x_buffers, waiting, staging = buffers[0], buffers[3], buffers[4]
    units, whole, steps, blocks = work
    SIZE: gl.constexpr = 64 * BLOCK_N
    HALVED: gl.constexpr = COLUMNS > BLOCK_N + EXTRA_N
    workspace += (gl.program_id(0).to(gl.int64) * 2 + W) * (SIZE * count(PLACES, "W"))
    if STAGING == "x":
        staging = x_buffers
    elif STAGING == "waiting":
        staging = waiting.index(W * count(PLACES, "S"))._reinterpret(
            out.dtype, [SIZE * 4 // 8192, 64, out.block_type.shape[1]], out.layout
        )
    step = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        tile, first, leaves, part = unit_of(unit, whole, LEAVES, PARTS, MIXED)
        total = gl.zeros([BLOCK_N // 8, 128, 4], gl.float32, layout=packed_layout())
        held = (total, total, total)
        if len(PLACES) == 0:
            step, sums, more = _multiply(
                step, ring, buffers, steps, W, STAGES, BLOCK_N, EXTRA_N, COLUMNS
            )
            total = pack(sums, BLOCK_N)
        else:
            AHEAD: gl.constexpr = count(PLACES, "W")
            for leaf in range(leaves - AHEAD):
                step, sums, more = _multiply(
                    step, ring, buffers, steps, W, STAGES, BLOCK_N, EXTRA_N, COLUMNS
                )
                total, held = carry(
                    leaf, leaves, pack(sums, BLOCK_N), held, waiting, workspace, W, PLACES, 0
                )
            if AHEAD:
                # What waits in the workspace is read while the last leaf is multiplied.
                read = gl.load(workspace + offsets(BLOCK_N // 8))
                step, sums, more = _multiply(
                    step, ring, buffers, steps, W, STAGES, BLOCK_N, EXTRA_N, COLUMNS
                )
                held = (held[0], held[1], read)
                total, held = carry(
                    leaves - 1, leaves, pack(sums, BLOCK_N), held, waiting, workspace, W,
                    in_registers(PLACES), 0,
                )  # fmt: skip
        last = unit >= 0
        if PARTS > 1:
            split = tile - whole
            if split >= 0:
                mine = parts + split.to(gl.int64) * (PARTS * 2 * SIZE) + W * SIZE
                gl.store(mine + part * (2 * SIZE) + offsets(BLOCK_N // 8), total)
                gl.thread_barrier()
                arrival = arrivals + split * 2 + W
                last = gl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == PARTS - 1
                if last:
                    total = gather(mine, 2 * SIZE, PARTS, BLOCK_N // 8)
                    gl.store(arrival, 0)
        if last:
            row, column = origin(tile, blocks, 64 if HALVED else 128, COLUMNS)
            if HALVED:
                column += W * BLOCK_N
            else:
                row += W * 64
            if STAGING == "waiting":
                # The staging buffers lie over partial sums that have all been read.
                gl.thread_barrier()
            pieces = store(unpack(total, BLOCK_N), out, staging, row, column, 0, W, STAGING)
            if EXTRA_N:
                store(more, out, staging, row, column + BLOCK_N, pieces, W, STAGING)
    tma.store_wait(0)
