"""Sums of leaves that wait outside the tensor core's accumulator (Gluon, Hopper).

A consumer of `kernel_persistent` is one warp group: 128 threads that hold a [64, N] fp32
accumulator, N/2 registers each. `pack` names those registers [N/8, 128 threads, 4]: one store of a
packed block is 16 bytes a thread, contiguous over a warp, and each thread later reads what it wrote
itself. Every add is one IEEE fp32 addition of two finished sums, in the order of the schema's
balanced tree.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Rows of a packed block that are read at a time: the read of a whole one would need as many
# registers again as the accumulator has.
_CHUNK = gl.constexpr(8)


@gluon.constexpr_function
def accumulator_layout(n):
    """[64, n] over the four warps of a warp group, as wgmma returns it."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.constexpr_function
def packed_layout():
    """[registers / 4, 128 threads, 4 registers]."""
    return gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0])


@gluon.constexpr_function
def count(places, kind):
    """How many of a plan's levels wait in `kind`."""
    return places.count(kind)


@gluon.constexpr_function
def count_below(places, level, kind):
    """How many levels below `level` wait in `kind`."""
    return places[:level].count(kind)


@gluon.constexpr_function
def place(places, level):
    """Where the left half of level `level` waits: registers R, shared memory S, workspace W."""
    return places[level]


@gluon.constexpr_function
def in_registers(places):
    """The same levels once what waited in the workspace has been read."""
    return places.replace("W", "R")


@gluon.jit
def plus(left, right):
    """`left + right`: fp32, or pairs of bf16 in 32-bit words, each sum rounded once."""
    if left.dtype == gl.int32:
        # The bits of an fp32 sum rounded to bf16, for every pair of numbers (`miles conform`).
        return gl.inline_asm_elementwise(
            "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [left, right], gl.int32, True, 1
        )
    else:
        return left + right


@gluon.jit
def pack(accumulator, N: gl.constexpr):
    """[64, N] -> packed [N/8, 128, 4]; moves nothing."""
    block = accumulator.reshape([4, 2, 8, N // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return gl.convert_layout(block.reshape([N // 8, 128, 4]), packed_layout(), assert_trivial=True)


@gluon.jit
def unpack(block, N: gl.constexpr):
    """The inverse of `pack`."""
    accumulator = block.reshape([N // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    return gl.convert_layout(
        accumulator.reshape([64, N]), accumulator_layout(N), assert_trivial=True
    )


@gluon.jit
def offsets(ROWS: gl.constexpr):
    """Element offsets of a packed block of ROWS rows."""
    layout: gl.constexpr = packed_layout()
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    thread = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    register = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    return row[:, None, None] * 512 + thread[None, :, None] * 4 + register[None, None, :]


@gluon.jit
def _halves(block):
    first, second = block.reshape([2, block.shape[0] // 2, 128, 4]).permute([1, 2, 3, 0]).split()
    return (
        gl.convert_layout(first, packed_layout(), assert_trivial=True),
        gl.convert_layout(second, packed_layout(), assert_trivial=True),
    )


@gluon.jit
def _joined(first, second):
    block = gl.join(first, second).permute([3, 0, 1, 2]).reshape([first.shape[0] * 2, 128, 4])
    return gl.convert_layout(block, packed_layout(), assert_trivial=True)


@gluon.jit
def _put(block, PLACE: gl.constexpr, buffer, pointer):
    if PLACE == "S":
        # The last tile may still leave through this memory (`kernel_persistent.store`).
        tma.store_wait(0)
        gl.thread_barrier()
        buffer.store(block)
    else:
        gl.store(pointer + offsets(block.shape[0]), block)


@gluon.jit
def _add_waiting(block, PLACE: gl.constexpr, buffer, pointer):
    """The waiting left half + `block`."""
    ROWS: gl.constexpr = block.shape[0]
    if ROWS > _CHUNK:
        first, second = _halves(block)
        if PLACE == "S":
            first = _add_waiting(first, PLACE, buffer.slice(0, ROWS // 2), pointer)
            second = _add_waiting(second, PLACE, buffer.slice(ROWS // 2, ROWS // 2), pointer)
        else:
            first = _add_waiting(first, PLACE, buffer, pointer)
            second = _add_waiting(second, PLACE, buffer, pointer + ROWS // 2 * 512)
        return _joined(first, second)
    else:
        if PLACE == "S":
            waiting = buffer.load(packed_layout())
        else:
            waiting = gl.load(pointer + offsets(ROWS))
        return plus(waiting, block)


@gluon.jit
def carry(
    leaf,
    leaves,
    total,
    held,
    waiting,
    workspace,
    W: gl.constexpr,
    PLACES: gl.constexpr,
    LEVEL: gl.constexpr,
):
    """A leaf's step of the binary counter whose slot i holds the sum of 2**i leaves.

    total: packed. held: the three slots that may be registers. An even count waits in its level's
    place; an odd one adds what waits on its left and carries on. Returns (total, held).
    """
    if LEVEL < len(PLACES):
        PLACE: gl.constexpr = place(PLACES, LEVEL)
        if PLACE == "S":
            buffer = waiting.index(W * count(PLACES, "S") + count_below(PLACES, LEVEL, "S"))
        else:
            buffer = waiting
        pointer = workspace + count_below(PLACES, LEVEL, "W") * (total.shape[0] * 512)
        slot0, slot1, slot2 = held
        if ((leaf >> LEVEL) & 1) == 0:
            if PLACE == "R":
                if LEVEL == 0:
                    slot0 = total
                elif LEVEL == 1:
                    slot1 = total
                else:
                    slot2 = total
            else:
                if leaf + 1 < leaves:
                    _put(total, PLACE, buffer, pointer)
        else:
            if PLACE == "R":
                if LEVEL == 0:
                    total = plus(slot0, total)
                elif LEVEL == 1:
                    total = plus(slot1, total)
                else:
                    total = plus(slot2, total)
            else:
                total = _add_waiting(total, PLACE, buffer, pointer)
            slots = (slot0, slot1, slot2)
            total, slots = carry(
                leaf, leaves, total, slots, waiting, workspace, W, PLACES, LEVEL + 1
            )
            slot0, slot1, slot2 = slots
        return total, (slot0, slot1, slot2)
    else:
        return total, held


@gluon.jit
def _tree(pointer, stride, FIRST: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr):
    if COUNT == 1:
        # Written by another program: around this processor's first-level cache.
        return gl.load(pointer + FIRST * stride + offsets(ROWS), cache_modifier=".cg")
    else:
        left = _tree(pointer, stride, FIRST, COUNT // 2, ROWS)
        return plus(left, _tree(pointer, stride, FIRST + COUNT // 2, COUNT // 2, ROWS))


@gluon.jit
def gather(pointer, stride, PARTS: gl.constexpr, ROWS: gl.constexpr):
    """The tree over the PARTS packed blocks of ROWS rows that lie `stride` elements apart."""
    if ROWS > _CHUNK:
        first = gather(pointer, stride, PARTS, ROWS // 2)
        return _joined(first, gather(pointer + ROWS // 2 * 512, stride, PARTS, ROWS // 2))
    else:
        return _tree(pointer, stride, 0, PARTS, ROWS)
