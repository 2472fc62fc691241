"""Sums over ranks in the contract's order, in one kernel over memory that the ranks map.

Every rank launches the same programs; program p of a rank waits only for program p of the others.
A rank's flags, [WORLD, PROGRAMS] int32, hold for each rank and program the last epoch at which it
arrived. Epochs count up in the rank's own memory, so that a CUDA graph can be replayed, and are
equal for all programs between launches. The launches of a group are on one stream and in one order
on every rank: a rank that arrives has finished all its earlier launches.

One shot (small messages): a rank writes its message into every rank's memory, arrives, waits, and
adds what it received. What is received lies in two halves that alternate with the epoch. A half
written at epoch e is written again at e + 2 or later, by a rank that has passed the wait of a
launch after e's: then every rank had arrived there, hence had finished reading at e.

Two shots (large messages, and reduce-scatter): the messages are staged in the ranks' own memory. A
rank arrives, waits, adds its own share of everybody's stage, leaves the rounded sums in its own
memory for the others, arrives and waits again, and copies the other shares. After the second wait
every rank has read the stage: it may be written once the launch has ended. The rounded sums are
written again after the first wait of a later launch, at which every rank had copied them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from ..elementary_kernel import UNFUSED
from ..formats import require
from ..launch import launch
from .workspace import PROGRAMS, Workspace

# Elements that a program moves at a time, and its warps: 16 bytes a thread and load in fp32; for
# large messages four such loads are in flight from every rank.
_FEW: Final = (512, 4)
_MANY: Final = (4096, 8)
# How often a program looks for an arrival before it stops the device: minutes at least, for the
# other rank may be compiling.
POLLS: Final = (1 << 31) - 1


@triton.jit
def _add(left, right):
    """`left + right` rounded to their dtype; for bf16 the fp32 sum changes no rounding."""
    return (left.to(tl.float32) + right.to(tl.float32)).to(left.dtype)


@triton.jit
def _tree(
    parts, offset, inside, bias, FIRST: tl.constexpr, COUNT: tl.constexpr, SPAN: tl.constexpr
):
    """The balanced tree over parts FIRST to FIRST + COUNT; `bias` is added to the sum of the first
    SPAN parts (0: nowhere)."""
    if COUNT == 1:
        # Written by other processors: around this one's first-level cache.
        value = tl.load(parts[FIRST] + offset, mask=inside, other=0.0, cache_modifier=".cg")
    else:
        left = _tree(parts, offset, inside, bias, FIRST, COUNT // 2, SPAN)
        right = _tree(parts, offset, inside, bias, FIRST + COUNT // 2, COUNT // 2, SPAN)
        value = _add(left, right)
    if FIRST == 0 and COUNT == SPAN:
        value = _add(value, bias.to(value.dtype))
    return value


@triton.jit
def _sum(parts, bias_ptr, offset, index, inside, columns, COUNT: tl.constexpr, SPAN: tl.constexpr):
    """The tree over all parts at `offset`, which is element `index` of the whole message."""
    bias = index
    if SPAN > 0:
        bias = tl.load(bias_ptr + index % columns, mask=inside, other=0.0)
    return _tree(parts, offset, inside, bias, 0, COUNT, SPAN)


@triton.jit
def _meet(flags, epoch, polls, RANK: tl.constexpr, WORLD: tl.constexpr, PROGRAMS: tl.constexpr):
    """Arrive at `epoch` and wait for the same program of every rank: what each of them wrote before
    can be read after, and what each of them read before can be written."""
    program = tl.program_id(0)
    rank = tl.arange(0, WORLD)
    address = tl.zeros((WORLD,), tl.int64)
    for peer in tl.static_range(WORLD):
        address = tl.where(rank == peer, flags[peer].to(tl.int64), address)
    theirs = address.to(tl.pointer_type(tl.int32)) + RANK * PROGRAMS + program
    mine = flags[RANK] + rank * PROGRAMS + program
    zero = tl.zeros((WORLD,), tl.int32)
    # All threads' accesses before one thread's release, and after its acquire.
    tl.debug_barrier()
    tl.atomic_xchg(theirs, zero + epoch, sem="release", scope="sys")
    # A difference, for epochs may wrap around.
    behind = tl.min(tl.atomic_add(mine, zero, sem="acquire", scope="sys") - epoch, 0)
    looked = 0
    while (behind < 0) & (looked < polls):
        behind = tl.min(tl.atomic_add(mine, zero, sem="acquire", scope="sys") - epoch, 0)
        looked += 1
    if behind < 0:
        tl.inline_asm_elementwise(
            "trap; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def _count(epochs_ptr, epoch, PROGRAMS: tl.constexpr):
    """Leave `epoch` for every program, also for those that this launch did not have."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    tl.store(epochs_ptr + program, epoch)
    if program == 0:
        other = tl.arange(0, PROGRAMS)
        tl.store(epochs_ptr + other, tl.zeros_like(other) + epoch, mask=other >= programs)


@triton.jit(do_not_specialize=["polls"])
def one_shot_kernel(
    x_ptr,
    bias_ptr,
    out_ptr,
    received,
    flags,
    epochs_ptr,
    numel,
    columns,
    polls,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    SPAN: tl.constexpr,
    CAPACITY: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [numel] = the tree over the ranks' x; received: each rank's [2, WORLD, CAPACITY]."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs_ptr + program) + 1
    half = (epoch & 1) * (WORLD * CAPACITY)
    for start in range(program * BLOCK, numel, programs * BLOCK):
        offset = start + tl.arange(0, BLOCK)
        inside = offset < numel
        value = tl.load(x_ptr + offset, mask=inside)
        for peer in tl.static_range(WORLD):
            tl.store(received[peer] + half + RANK * CAPACITY + offset, value, mask=inside)
    _meet(flags, epoch, polls, RANK, WORLD, PROGRAMS)
    parts = ()
    for peer in tl.static_range(WORLD):
        parts = parts + (received[RANK] + half + peer * CAPACITY,)  # type: ignore[assignment]
    for start in range(program * BLOCK, numel, programs * BLOCK):
        offset = start + tl.arange(0, BLOCK)
        inside = offset < numel
        total = _sum(parts, bias_ptr, offset, offset, inside, columns, WORLD, SPAN)
        tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=inside)
    _count(epochs_ptr, epoch, PROGRAMS)


@triton.jit(do_not_specialize=["polls"])
def two_shot_kernel(
    staged,
    shared,
    bias_ptr,
    out_ptr,
    flags,
    epochs_ptr,
    numel,
    share,
    columns,
    polls,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    SPAN: tl.constexpr,
    GATHER: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The tree over the ranks' staged [numel]; rank r adds elements r * share to (r + 1) * share.

    GATHER: out is [numel], all of it, by way of the ranks' shared [share]; else out [share] is this
    rank's part, with whatever follows element numel - 1 left as it is.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs_ptr + program) + 1
    _meet(flags, epoch, polls, RANK, WORLD, PROGRAMS)
    for start in range(program * BLOCK, share, programs * BLOCK):
        offset = start + tl.arange(0, BLOCK)
        index = RANK * share + offset
        inside = (offset < share) & (index < numel)
        total = _sum(staged, bias_ptr, index, index, inside, columns, WORLD, SPAN)
        total = total.to(out_ptr.dtype.element_ty)
        if GATHER:
            tl.store(shared[RANK] + offset, total, mask=inside)
            tl.store(out_ptr + index, total, mask=inside)
        else:
            tl.store(out_ptr + offset, total, mask=inside)
    _meet(flags, epoch + 1, polls, RANK, WORLD, PROGRAMS)
    if GATHER:
        for start in range(program * BLOCK, share, programs * BLOCK):
            offset = start + tl.arange(0, BLOCK)
            # Read from every rank before the first store: all links at work.
            values = ()
            for peer in tl.static_range(WORLD):
                inside = (offset < share) & (peer * share + offset < numel)
                if peer != RANK:
                    value = tl.load(shared[peer] + offset, mask=inside, cache_modifier=".cg")
                    values = values + (value,)  # type: ignore[assignment]
                else:
                    values = values + (0,)  # type: ignore[assignment]
            for peer in tl.static_range(WORLD):
                inside = (offset < share) & (peer * share + offset < numel)
                if peer != RANK:
                    tl.store(out_ptr + peer * share + offset, values[peer], mask=inside)
    _count(epochs_ptr, epoch + 1, PROGRAMS)


@triton.jit
def combine_kernel(
    parts,
    bias_ptr,
    out_ptr,
    numel,
    columns,
    COUNT: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [numel] = the tree over COUNT parts that are all here."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    total = _sum(parts, bias_ptr, offset, offset, inside, columns, COUNT, SPAN)
    tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=inside)


def _check(x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, columns: int) -> None:
    floats = (torch.bfloat16, torch.float32)
    require(
        x.dtype in floats and out.dtype in floats and x.is_contiguous() and out.is_contiguous(),
        f"tree_all_reduce kernel: {x.dtype} to {out.dtype}; it adds contiguous bfloat16 or float32 "
        "(fp64 gradchecks run on the CPU reference)",
    )
    require(
        bias is None or (bias.is_contiguous() and bias.numel() == columns),
        f"tree_all_reduce kernel: a bias of {None if bias is None else tuple(bias.shape)} for "
        f"rows of {columns}",
    )


def _sizes(numel: int) -> tuple[int, int]:
    """(block, warps) for so many elements."""
    return _FEW if numel <= PROGRAMS * _FEW[0] else _MANY


def launch_one_shot(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    workspace: Workspace,
    *,
    span: int,
    columns: int,
    polls: int = POLLS,
) -> None:
    """out = the tree over the ranks' x (same shape, contiguous, bf16 or fp32), on every rank.

    `bias` [columns] is added to the sum of the first `span` ranks (0: not at all). Collective.
    Raises `ValueError` for a message larger than the workspace's.
    """
    _check(x, bias, out, columns)
    areas = workspace.areas
    require(
        x.numel() * x.element_size() <= areas.one_shot_bytes,
        f"tree_all_reduce: {x.numel()} x {x.dtype} in one shot of {areas.one_shot_bytes} bytes",
    )
    block, warps = _sizes(x.numel())
    programs = min(PROGRAMS, triton.cdiv(x.numel(), block))
    launch(
        one_shot_kernel,
        (programs,),
        (
            x, bias, out, workspace.received(x.dtype), workspace.flags, workspace.epochs,
            x.numel(), columns, polls,
        ),
        {
            "RANK": workspace.rank, "WORLD": areas.world, "SPAN": span if bias is not None else 0,
            "CAPACITY": areas.one_shot_bytes // x.element_size(), "PROGRAMS": PROGRAMS,
            "BLOCK": block, "num_warps": warps, **UNFUSED,
        },
    )  # fmt: skip


def launch_two_shot(
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    workspace: Workspace,
    *,
    numel: int,
    share: int,
    gather: bool,
    span: int,
    columns: int,
    polls: int = POLLS,
) -> None:
    """The tree over the first `numel` elements of the ranks' stages in `dtype`, the same call on
    every rank; as `two_shot_kernel` and `launch_one_shot`."""
    staged, shared = workspace.staged(dtype), workspace.shared(out.dtype)
    _check(staged[0], bias, out, columns)
    areas = workspace.areas
    require(
        numel <= staged[0].numel() and (share <= shared[0].numel() or not gather),
        f"tree_all_reduce: {numel} x {dtype} in shares of {share} x {out.dtype} do not fit the "
        f"{areas.staged_bytes} bytes of a stage",
    )
    block, warps = _sizes(share)
    programs = min(PROGRAMS, triton.cdiv(share, block))
    launch(
        two_shot_kernel,
        (programs,),
        (
            staged, shared, bias, out, workspace.flags, workspace.epochs, numel, share, columns,
            polls,
        ),
        {
            "RANK": workspace.rank, "WORLD": areas.world, "SPAN": span if bias is not None else 0,
            "GATHER": gather, "PROGRAMS": PROGRAMS, "BLOCK": block, "num_warps": warps, **UNFUSED,
        },
    )  # fmt: skip


def launch_combine(
    parts: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    span: int,
    columns: int,
) -> None:
    """out = the tree over parts of one shape that are all on this device; bias as above."""
    for part in parts:
        _check(part, bias, out, columns)
        assert part.numel() == out.numel() and part.dtype == parts[0].dtype
    block, warps = _FEW
    launch(
        combine_kernel,
        (triton.cdiv(out.numel(), block),),
        (tuple(parts), bias, out, out.numel(), columns),
        {
            "COUNT": len(parts), "SPAN": span if bias is not None else 0, "BLOCK": block,
            "num_warps": warps, **UNFUSED,
        },
    )  # fmt: skip
