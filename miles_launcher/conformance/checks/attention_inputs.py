"""The inputs of the attention checks, the fp64 formula, and the claims that hold of any kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..bits import random
from ..context import Context

HEADS, KV_HEADS = 4, 2
Run = Callable[..., torch.Tensor]


def operands(lengths: tuple[int, ...], head_dim: int) -> list[torch.Tensor]:
    """Packed query, key and value."""
    tokens = sum(lengths)
    return [
        random(tokens, HEADS, head_dim, seed=101),
        random(tokens, KV_HEADS, head_dim, seed=102),
        random(tokens, KV_HEADS, head_dim, seed=103),
    ]


def scale_of(head_dim: int) -> float:
    """The usual scale of the scores."""
    return head_dim**-0.5


def scores_of(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """[heads, queries, keys] in fp64, -inf where a query does not see a key."""
    q, k = q.cpu().double(), k.cpu().double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
    return scores.masked_fill(~seen, float("-inf"))


def exact_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> list[torch.Tensor]:
    """One sequence in fp64: (result, the same with |v|), by the formula."""
    weights = scores_of(q, k, scale).softmax(-1)
    v = v.cpu().double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return [torch.einsum("hqk,khd->qhd", weights, t) for t in (v, v.abs())]


def sequences(lengths: tuple[int, ...]) -> list[slice]:
    """Where each sequence stands in the packed tokens."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def near(ctx: Context, run: Run, label: str, head_dims: tuple[int, ...] = ()) -> float:
    """Every sequence within the bound of the formula; the largest share of it used."""
    worst, lengths = 0.0, ctx.setting.lengths
    for head_dim in head_dims or ctx.setting.head_dims:
        q, k, v = operands(lengths, head_dim)
        scale = scale_of(head_dim)
        out = run(*ctx.put(q, k, v), list(lengths), list(lengths), scale)
        for mine in sequences(lengths):
            exact, magnitudes = exact_of(q[mine], k[mine], v[mine], scale)
            # The result rounded to bf16, and on a GPU the weights too; scores in fp32.
            bound = 2.0**-8 * 1.1 * (exact.abs() + magnitudes)
            worst = max(worst, ctx.near(out[mine], exact, bound, f"{label}, head_dim {head_dim}"))
    return worst


def same_phases(ctx: Context, run: Run, label: str, head_dims: tuple[int, ...] = ()) -> None:
    """One query, half and all of each sequence have the bits that they have in a prefill."""
    lengths = ctx.setting.lengths
    for head_dim in head_dims or ctx.setting.head_dims:
        q, k, v = ctx.put(*operands(lengths, head_dim))
        scale = scale_of(head_dim)
        out = run(q, k, v, list(lengths), list(lengths), scale).cpu()
        for mine in sequences(lengths):
            length = mine.stop - mine.start
            # One query is a decode step, fewer than all a chunk behind a cached prefix.
            for queries in sorted({1, (length + 1) // 2, length}):
                last = slice(mine.stop - queries, mine.stop)
                part = run(q[last], k[mine], v[mine], [queries], [length], scale)
                at = f"{label}, head_dim {head_dim}: the last {queries} of {length}"
                ctx.equal(part, out[last], at)
