"""Each attention kernel by itself, with the log-sum-exp that only the launchers return."""

from __future__ import annotations

import torch

from ..context import Context
from ..properties import NotShown
from ..subject import Table
from .attention_inputs import near, operands, same_phases, scale_of, scores_of, sequences


def kernel_table(ctx: Context) -> str:
    """Each kernel by itself: the two have different bits, so each is held to its own claims."""
    table = ctx.subject.table("attention")
    if table is None or not table.entries:
        raise NotShown("the subject brings no kernel table")
    notes, missing = [], []
    for entry in table.entries:

        def run(*arguments: object, entry: object = entry) -> torch.Tensor:
            out: torch.Tensor = table.run(entry, *arguments)[0]
            return out

        try:
            worst = near(ctx, run, str(entry))
        except ImportError as error:
            missing.append(f"{entry} did not run: {error}")
            continue
        same_phases(ctx, run, str(entry))
        _log_sum_exp(ctx, table, entry)
        notes.append(f"{entry} ({worst:.2f} of the bound)")
    if missing:
        raise NotShown("; ".join([*missing, f"shown: {', '.join(notes) or 'none'}"]))
    return ", ".join(notes)


def _log_sum_exp(ctx: Context, table: Table, entry: object) -> None:
    """The second result, which the backward reads: near fp64, and the same in every phase."""
    lengths = list(ctx.setting.lengths)
    for head_dim in ctx.setting.head_dims:
        q, k, v = ctx.put(*operands(ctx.setting.lengths, head_dim))
        scale = scale_of(head_dim)
        lse = table.run(entry, q, k, v, lengths, lengths, scale)[1].cpu()
        for mine in sequences(ctx.setting.lengths):
            length, label = mine.stop - mine.start, f"{entry}, head_dim {head_dim}: log-sum-exp"
            exact = scores_of(q[mine], k[mine], scale).logsumexp(-1)
            ctx.near(lse[:, mine], exact, 1e-3, label)
            last = slice(mine.stop - 1, mine.stop)
            one = table.run(entry, q[last], k[mine], v[mine], [1], [length], scale)[1]
            ctx.equal(one, lse[:, last], f"{label}, the last of {length}")
