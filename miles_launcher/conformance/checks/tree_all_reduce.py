"""`tree_all_reduce`: ranks exchange and add as a balanced tree; the transport adds nothing."""

from __future__ import annotations

import torch

from ..bits import random
from ..context import Context, array
from ..oracle import products
from ..subject import ops, row_reduction
from .common import OpSuite, neighbours, repeated
from .row_linear_cases import V2

_DTYPES = (torch.bfloat16, torch.float32)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def part(rank: int, dtype: torch.dtype, rows: int = 33) -> torch.Tensor:
    """What one rank brings: magnitudes that differ, so that the order shows."""
    return random(rows, 7, seed=40 + rank, dtype=dtype, scale=4.0 ** (rank % 3))


def _summed(ctx: Context, parts: list[torch.Tensor]) -> torch.Tensor:
    """The ranks' parts in one process: the op's combination, without the exchange."""
    # Without a bias the reduction says nothing more: the tree is over the parts.
    reduction = row_reduction(V2, 64)
    out: torch.Tensor = ctx.subject.combine_partials(parts, None, reduction)
    return out


def order(ctx: Context) -> str:
    for dtype in _DTYPES:
        for tp in ctx.setting.tp:
            parts = [part(rank, dtype) for rank in range(tp)]
            out = _summed(ctx, ctx.put(*parts))
            wanted = products.tree([array(p) for p in parts], _name(dtype))
            ctx.equal(out, wanted, f"{tp} ranks, {dtype}")
            if tp > 2:
                arrays = [array(p) for p in parts]
                chain = products.chain(arrays, _name(dtype))
                ctx.shows(wanted, chain, f"{tp} ranks, {dtype}: a chain")
                swapped = [arrays[0], arrays[2], arrays[1], *arrays[3:]]
                other = products.tree(swapped, _name(dtype))
                ctx.shows(wanted, other, f"{tp} ranks, {dtype}: ranks swapped")
    return f"{ctx.setting.tp} parts, bf16 and fp32; a chain and swapped ranks give other bits"


def value(ctx: Context) -> str:
    worst = 0.0
    for dtype, unit in zip(_DTYPES, (2.0**-8, 2.0**-24), strict=True):
        for tp in ctx.setting.tp[1:]:
            parts = [part(rank, dtype) for rank in range(tp)]
            stacked = torch.stack(parts).double()
            bound = (tp.bit_length() - 1) * unit * 1.01 * stacked.abs().sum(0)
            out = _summed(ctx, ctx.put(*parts))
            worst = max(worst, ctx.near(out, stacked.sum(0), bound, f"{tp} ranks, {dtype}"))
    return f"at most {worst:.2f} of levels * half a unit * sum|x|"


def dtypes(ctx: Context) -> str:
    one = ops.RankGroup()
    for dtype in _DTYPES:
        (x,) = ctx.put(part(0, dtype))
        for function in (ctx.subject.tree_all_reduce, ctx.subject.tree_reduce_scatter):
            out = function(x, one)
            ctx.require(out.dtype == dtype, f"{dtype} in, {out.dtype} out")
            ctx.equal(out, x.cpu(), f"{dtype}: a group of one")
    (x,) = ctx.put(part(0, torch.float32))
    ctx.refused(lambda: _summed(ctx, [x] * 3), "three ranks")
    ctx.refused(lambda: ops.RankGroup(size=4), "four ranks without a process group")
    return "bf16 and fp32; three ranks, and ranks without a group, refused"


def shapes(ctx: Context) -> str:
    for rows in ctx.setting.rows:
        parts = [random(rows, 5, seed=50 + rank) for rank in range(4)]
        out = _summed(ctx, ctx.put(*parts))
        ctx.equal(out, products.tree([array(p) for p in parts], "bfloat16"), f"{rows} rows")
    return f"rows {ctx.setting.rows}"


def beside(ctx: Context) -> str:
    parts = [random(max(ctx.setting.rows), 5, seed=50 + rank) for rank in range(4)]
    return neighbours(ctx, lambda *p: _summed(ctx, list(p)), ctx.put(*parts), "tree")


def tp_shards(ctx: Context) -> str:
    """Each rank's own subtree first, then the ranks: the same tree at every degree."""
    parts = [part(rank, torch.float32) for rank in range(8)]
    expected = products.tree([array(p) for p in parts], "float32")
    for tp in ctx.setting.tp:
        each = 8 // tp
        subtrees = [_summed(ctx, ctx.put(*parts[r * each : (r + 1) * each])) for r in range(tp)]
        ctx.equal(_summed(ctx, subtrees), expected, f"eight leaves over {tp} ranks")
    ctx.degrees = ctx.setting.tp
    return f"eight leaves over {ctx.setting.tp} ranks"


def run_to_run(ctx: Context) -> str:
    parts = ctx.put(*(part(rank, torch.bfloat16) for rank in range(8)))
    repeated(ctx, lambda: _summed(ctx, parts), "tree")
    return "four calls"


SUITE = OpSuite(
    name="tree_all_reduce",
    checks={
        "order": order,
        "value": value,
        "dtypes": dtypes,
        "shapes": shapes,
        "neighbours": beside,
        "tp_shards": tp_shards,
        "run_to_run": run_to_run,
    },
    absent={
        "phases": "a row has no phase here; see neighbours",
        "split_k": "there is no K",
        "kernel_table": "one kernel, no table",
        "cpu_bits": "fp32 and bf16 additions; the oracle's bits are the claim (see order)",
    },
    fault=(
        ("combine_partials", "order"),
        ("tree_all_reduce", "dtypes"),
        ("tree_reduce_scatter", "dtypes"),
    ),
)
