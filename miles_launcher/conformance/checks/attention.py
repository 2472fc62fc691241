"""`attention`: causal, one split; a token's bits are its own keys' in every phase and batch."""

from __future__ import annotations

import torch

from ..bits import random
from ..context import Context, array
from ..oracle import rows as oracle
from ..properties import NotShown
from .attention_inputs import (
    HEADS,
    KV_HEADS,
    Run,
    exact_of,
    near,
    operands,
    same_phases,
    scale_of,
    sequences,
)
from .attention_kernels import kernel_table
from .common import OpSuite, repeated

BF16 = torch.bfloat16


def _public(ctx: Context) -> Run:
    """The public op, in the launchers' argument order."""

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: list[int],
        keys: list[int],
        s: float,
    ) -> torch.Tensor:
        try:
            out: torch.Tensor = ctx.subject.attention(
                q, k, v, query_lengths=queries, key_lengths=keys, scale=s
            )
        except ImportError as error:
            raise NotShown(f"this GPU's attention is FA3: {error}") from error
        return out

    return run


def order(ctx: Context) -> str:
    """The reference's order, sequence by sequence, in bf16 and in fp32: eight bits of a result hide
    most of another order, all of them do not."""
    run, lengths = _public(ctx), ctx.setting.lengths
    for head_dim in ctx.setting.head_dims:
        scale = scale_of(head_dim)
        for dtype in (BF16, torch.float32):
            name = str(dtype).removeprefix("torch.")
            q, k, v = (t.to(dtype) for t in operands(lengths, head_dim))
            out = run(*ctx.put(q, k, v), list(lengths), list(lengths), scale)
            for mine in sequences(lengths):
                a, b, c = (array(t[mine]) for t in (q, k, v))
                wanted = oracle.attention(a, b, c, scale, ctx.exp, name)
                label = f"head_dim {head_dim}, {name}, {mine.stop - mine.start} tokens"
                ctx.equal(out[mine], wanted, label)
        other = oracle.attention(a[-1:], b[::-1], c[::-1], scale, ctx.exp, name)
        ctx.shows(wanted[-1:], other, f"head_dim {head_dim}: keys turned round")
    return f"lengths {lengths}, head_dim {ctx.setting.head_dims}, {HEADS} heads over {KV_HEADS}"


def value(ctx: Context) -> str:
    worst = near(ctx, _public(ctx), "attention")
    return f"at most {worst:.2f} of half a bf16 unit of the result and of every weight"


def dtypes(ctx: Context) -> str:
    run = _public(ctx)
    q, k, v = ctx.put(*operands((3, 5), ctx.setting.head_dims[-1]))
    out = run(q, k, v, [3, 5], [3, 5], 0.125)
    ctx.require(out.dtype == BF16, f"bf16 in, {out.dtype} out")
    ctx.refused(lambda: run(q, k, v, [3, 4], [3, 5], 0.125), "lengths that miss a token")
    ctx.refused(lambda: run(q, k, v, [5, 3], [3, 5], 0.125), "more queries than keys")
    ctx.refused(lambda: run(q[:, :3], k, v, [3, 5], [3, 5], 0.125), "3 heads over 2")
    if ctx.kernels:
        ctx.refused(lambda: run(q.half(), k.half(), v.half(), [3, 5], [3, 5], 0.125), "fp16")
    return "bf16; lengths and heads that do not fit refused"


def shapes(ctx: Context) -> str:
    """Strided inputs, other group sizes, one token; what a batch holds beside is `neighbours`."""
    run = _public(ctx)
    for heads, kv_heads in ((1, 1), (6, 2), (8, 1)):
        q = random(12, heads, ctx.setting.head_dims[-1], seed=104)
        k, v = (random(12, kv_heads, ctx.setting.head_dims[-1], seed=n) for n in (105, 106))
        out = run(*ctx.put(q, k, v), [12], [12], 0.125)
        exact, magnitudes = exact_of(q, k, v, 0.125)
        bound = 2.0**-8 * 1.1 * (exact.abs() + magnitudes)
        ctx.near(out, exact, bound, f"{heads} heads over {kv_heads}")
        fused = torch.cat((q, k, v), 1)
        (there,) = ctx.put(fused)
        parts = there.split((heads, kv_heads, kv_heads), 1)
        ctx.equal(run(*parts, [12], [12], 0.125), out.cpu(), f"{heads}: slices of one tensor")
        one = run(*ctx.put(q[:1], k[:1], v[:1]), [1], [1], 0.125)
        expected = v[:1].repeat_interleave(heads // kv_heads, 1)
        ctx.equal(one, expected, f"{heads} heads: one token is its own value")
    return "6, 8 and 1 heads over 2, 1 and 1; slices of a fused projection; one token"


def phases(ctx: Context) -> str:
    same_phases(ctx, _public(ctx), "attention")
    return f"one query, half and all of lengths {ctx.setting.lengths}"


def beside(ctx: Context) -> str:
    run, lengths = _public(ctx), ctx.setting.lengths
    q, k, v = ctx.put(*operands(lengths, ctx.setting.head_dims[-1]))
    out = run(q, k, v, list(lengths), list(lengths), 0.125).cpu()
    cuts = sequences(lengths)
    turned = [t for mine in reversed(cuts) for t in range(mine.start, mine.stop)]
    again = run(q[turned], k[turned], v[turned], list(lengths[::-1]), list(lengths[::-1]), 0.125)
    ctx.equal(again, out[turned], "sequences in another order")
    for mine in cuts:
        alone = run(q[mine], k[mine], v[mine], [len(out[mine])], [len(out[mine])], 0.125)
        ctx.equal(alone, out[mine], f"{len(out[mine])} tokens alone")
    kept = cuts[-1]
    # Finite: a kernel may multiply a neighbour's value by a weight of zero, and a NaN in a batch
    # leaves no logprob to compare.
    for number in (3e38, 0.0):
        spoiled = [torch.full_like(t, number) for t in (q, k, v)]
        for bad, good in zip(spoiled, (q, k, v), strict=True):
            bad[kept] = good[kept]
        found = run(*spoiled, list(lengths), list(lengths), 0.125)[kept]
        ctx.equal(found, out[kept], f"beside sequences of {number}")
    return f"lengths {lengths} alone, reversed, beside sequences of 3e38 and zero"


def tp_shards(ctx: Context) -> str:
    run, lengths = _public(ctx), [5, 9]
    q = random(14, 16, ctx.setting.head_dims[-1], seed=107)
    k, v = (random(14, 8, ctx.setting.head_dims[-1], seed=n) for n in (108, 109))
    moved = ctx.put(q, k, v)
    whole = run(*moved, lengths, lengths, 0.125).cpu()
    for tp in ctx.setting.tp:
        cut = zip(*(t.chunk(tp, 1) for t in moved), strict=True)
        parts = [run(*three, lengths, lengths, 0.125) for three in cut]
        ctx.equal(torch.cat(parts, 1), whole, f"16 heads over {tp} ranks")
    ctx.degrees = ctx.setting.tp
    return f"16 heads over 8, cut over {ctx.setting.tp}"


def run_to_run(ctx: Context) -> str:
    run, lengths = _public(ctx), list(ctx.setting.lengths)
    moved = ctx.put(*operands(ctx.setting.lengths, ctx.setting.head_dims[-1]))
    repeated(ctx, lambda: run(*moved, lengths, lengths, 0.125), "attention")
    return "four calls"


_TENSOR_CORE = "the order inside a product is the tensor core's own; see value and phases"
SUITE = OpSuite(
    name="attention",
    checks={
        "order": order,
        "value": value,
        "dtypes": dtypes,
        "shapes": shapes,
        "neighbours": beside,
        "phases": phases,
        "tp_shards": tp_shards,
        "kernel_table": kernel_table,
        "run_to_run": run_to_run,
    },
    absent={
        "tp_ranks": "heads are independent: nothing is added over ranks",
        "split_k": "the contract takes one split",
        "cpu_bits": _TENSOR_CORE,
    },
    absent_on_gpu={"order": _TENSOR_CORE},
    fault=(("attention", "order"), ("attention", "phases")),
    fault_on_gpu=(("attention", "phases"),),
)
