"""Each attention kernel by itself, with the log-sum-exp that only the launchers return."""

from __future__ import annotations

from typing import Any

import torch

from ..context import Context
from ..properties import NotShown
from ..subject import Table
from .attention_inputs import near, operands, same_phases, scale_of, scores_of, sequences

# The Triton path adds weights that are rounded to bf16, half a unit each; FA3 adds fp32 ones.
_LSE_BOUND = 2.0**-9 + 1e-4


def kernel_table(ctx: Context) -> str:
    """Each way to launch by itself, held to every claim; those of one order to each other."""
    table = ctx.subject.table("attention")
    if table is None or not table.entries:
        raise NotShown("the subject brings no kernel table")
    notes, missing = [], []
    first: dict[str, Any] = {}
    for entry in table.entries:
        covered = [d for d in ctx.setting.head_dims if entry.head_dims in (None, (d,))]
        if not covered:
            continue
        head_dims = tuple(covered)

        def run(*arguments: Any, entry: Any = entry) -> torch.Tensor:
            out: torch.Tensor = table.run(entry, *arguments)[0]
            return out

        try:
            worst = near(ctx, run, str(entry), head_dims)
        except ImportError as error:
            missing.append(f"{entry} did not run: {error}")
            continue
        same_phases(ctx, run, str(entry), head_dims)
        _log_sum_exp(ctx, table, entry, head_dims)
        _shards(ctx, run, str(entry), head_dims[-1])
        leader = first.setdefault(entry.order, entry)
        if leader is not entry:
            _same_order(ctx, table, leader, entry, head_dims)
        notes.append(f"{entry} ({worst:.2f} of the bound)")
    if missing:
        raise NotShown("; ".join([*missing, f"shown: {', '.join(notes) or 'none'}"]))
    return ", ".join(notes)


def _same_order(
    ctx: Context, table: Table, one: Any, other: Any, head_dims: tuple[int, ...]
) -> None:
    """A whole prefill and a step of one query a sequence, output and log-sum-exp."""
    lengths = list(ctx.setting.lengths)
    ends = [cut.stop - 1 for cut in sequences(ctx.setting.lengths)]
    for head_dim in head_dims:
        q, k, v = ctx.put(*operands(ctx.setting.lengths, head_dim))
        for queries, counts in ((q, lengths), (q[ends], [1] * len(lengths))):
            arguments = (queries, k, v, counts, lengths, scale_of(head_dim))
            pairs = zip(table.run(other, *arguments), table.run(one, *arguments), strict=True)
            for found, expected in pairs:
                label = f"{other} beside {one}, head_dim {head_dim}, {max(counts)} queries"
                ctx.equal(found, expected.cpu(), label)


def _shards(ctx: Context, run: Any, label: str, head_dim: int) -> None:
    """Fewer heads in the call, as Ulysses and tensor parallelism cut them, down to one."""
    lengths = list(ctx.setting.lengths)
    q, k, v = ctx.put(*operands(ctx.setting.lengths, head_dim))
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    whole = run(q, k, v, lengths, lengths, scale_of(head_dim)).cpu()
    for size in {group, 1}:
        for start in range(0, heads, size):
            mine, its = slice(start, start + size), slice(start // group, start // group + 1)
            part = run(q[:, mine], k[:, its], v[:, its], lengths, lengths, scale_of(head_dim))
            ctx.equal(part, whole[:, mine], f"{label}: {size} of {heads} heads from {start}")


def _log_sum_exp(ctx: Context, table: Table, entry: Any, head_dims: tuple[int, ...]) -> None:
    """The second result, which the backward reads: near fp64, and the same in every phase."""
    lengths = list(ctx.setting.lengths)
    for head_dim in head_dims:
        q, k, v = ctx.put(*operands(ctx.setting.lengths, head_dim))
        scale = scale_of(head_dim)
        lse = table.run(entry, q, k, v, lengths, lengths, scale)[1].cpu()
        for mine in sequences(ctx.setting.lengths):
            length, label = mine.stop - mine.start, f"{entry}, head_dim {head_dim}: log-sum-exp"
            exact = scores_of(q[mine], k[mine], scale).logsumexp(-1)
            ctx.near(lse[:, mine], exact, _LSE_BOUND, label)
            last = slice(mine.stop - 1, mine.stop)
            one = table.run(entry, q[last], k[mine], v[mine], [1], [length], scale)[1]
            ctx.equal(one, lse[:, last], f"{label}, the last of {length}")
