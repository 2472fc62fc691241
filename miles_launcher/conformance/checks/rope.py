"""`rope`: four products and two sums, each rounded, by one table."""

from __future__ import annotations

import numpy as np
import torch

from ..bits import random
from ..context import Context, array
from ..oracle import rows as oracle
from ..oracle.numbers import Array
from .common import OpSuite, neighbours, repeated
from .rope_table import POSITIONS, table_of

BF16, FP32 = torch.bfloat16, torch.float32
_HEADS, _KV_HEADS = 9, 3


def _operands(tokens: int, head_dim: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    """Query and key as slices of one fused projection, and positions, most beyond 4096."""
    fused = random(tokens, (_HEADS + 2 * _KV_HEADS) * head_dim, seed=71, dtype=dtype)
    query = fused[:, : _HEADS * head_dim].view(tokens, _HEADS, head_dim)
    key = fused[:, _HEADS * head_dim :][:, : _KV_HEADS * head_dim].view(tokens, _KV_HEADS, head_dim)
    return [query, key, (torch.arange(tokens) * 977 + 3) % POSITIONS]


def _wanted(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, dtype: str) -> Array:
    half = x.shape[-1] // 2
    chosen = array(table)[positions.numpy()]
    return oracle.rope(array(x), chosen[:, :half], chosen[:, half:], dtype)


def _compare(ctx: Context, tokens: int, head_dim: int, dtype: torch.dtype) -> None:
    query, key, positions = _operands(tokens, head_dim, dtype)
    table, name = table_of(ctx, head_dim), str(dtype).removeprefix("torch.")
    out = ctx.subject.rope(*ctx.put(query, key, positions, table))
    for found, given in zip(out, (query, key), strict=True):
        ctx.require(found.dtype == dtype, f"{dtype} in, {found.dtype} out")
        ctx.equal(found, _wanted(given, positions, table, name), f"head_dim {head_dim}, {dtype}")


def order(ctx: Context) -> str:
    for head_dim in ctx.setting.head_dims:
        for dtype in (BF16, FP32):
            _compare(ctx, 37, head_dim, dtype)
        query, _, positions = _operands(37, head_dim, FP32)
        table = table_of(ctx, head_dim)
        half = head_dim // 2
        a, b = array(query)[..., :half].astype(np.float64), array(query)[..., half:]
        chosen = array(table)[positions.numpy()][:, None, :]
        # One rounding after product and sum, as a fused multiply-add takes it.
        fused = (a * chosen[..., :half] - (b * chosen[..., half:])).astype(np.float32)
        wanted = _wanted(query, positions, table, "float32")[..., :half]
        ctx.shows(wanted, fused, f"head_dim {head_dim}: a fused multiply-add")
    return f"head_dim {ctx.setting.head_dims}, bf16 and fp32; a fused multiply-add differs"


def value(ctx: Context) -> str:
    worst = 0.0
    for head_dim in ctx.setting.head_dims:
        query, key, positions = _operands(37, head_dim)
        table, half = table_of(ctx, head_dim), head_dim // 2
        cos, sin = table[positions].double()[:, None].chunk(2, -1)
        a, b = query.double().chunk(2, -1)
        exact = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        parts = (a.abs() + b.abs()) * 2.0**-22
        bound = torch.cat((parts, parts), -1) + 2.0**-8 * exact.abs()
        out = ctx.subject.rope(*ctx.put(query, key, positions, table))[0]
        worst = max(worst, ctx.near(out, exact, bound, f"head_dim {head_dim}, {half} pairs"))
    return f"at most {worst:.2f} of half a bf16 unit + 2^-22 (|a| + |b|)"


def dtypes(ctx: Context) -> str:
    for dtype in (BF16, FP32):
        _compare(ctx, 5, 64, dtype)
    query, key, positions = ctx.put(*_operands(5, 64))
    (table,) = ctx.put(table_of(ctx, 64))
    narrow = positions.to(torch.int32)
    whole = ctx.subject.rope(query, key, positions, table)[0].cpu()
    ctx.equal(ctx.subject.rope(query, key, narrow, table)[0], whole, "int32 positions")
    rope = ctx.subject.rope
    ctx.refused(lambda: rope(query, key, positions, table.to(BF16)), "a bf16 table")
    ctx.refused(lambda: rope(query, key, positions[:-1], table), "too few positions")
    ctx.refused(lambda: rope(query, key, positions, table[:, :-2]), "a narrower table")
    return "bf16 and fp32, positions int32 and int64; a cast table refused"


def shapes(ctx: Context) -> str:
    for tokens in ctx.setting.rows:
        _compare(ctx, tokens, ctx.setting.head_dims[0], BF16)
    for head_dim in (48, *ctx.setting.head_dims):
        _compare(ctx, 7, head_dim, BF16)
    query, key, positions = ctx.put(*_operands(2, 64))
    (table,) = ctx.put(table_of(ctx, 64))
    empty = ctx.subject.rope(query[:0], key[:0], positions[:0], table)
    ctx.require(empty[0].shape == (0, _HEADS, 64), f"no tokens gave {tuple(empty[0].shape)}")
    return f"tokens {ctx.setting.rows}, head_dim 48 too, slices of a fused projection, no tokens"


def beside(ctx: Context) -> str:
    (table,) = ctx.put(table_of(ctx, 64))
    inputs = ctx.put(*_operands(max(ctx.setting.rows), 64))
    return neighbours(ctx, lambda q, k, p: ctx.subject.rope(q, k, p, table), inputs, "rope")


def tp_shards(ctx: Context) -> str:
    tokens, head_dim = 5, ctx.setting.head_dims[0]
    query, key = random(tokens, 16, head_dim, seed=72), random(tokens, 8, head_dim, seed=73)
    moved = ctx.put(query, key, torch.arange(tokens) * 1000, table_of(ctx, head_dim))
    whole = [t.cpu() for t in ctx.subject.rope(*moved)]
    for tp in ctx.setting.tp:
        cut = zip(moved[0].chunk(tp, 1), moved[1].chunk(tp, 1), strict=True)
        parts = [ctx.subject.rope(q, k, *moved[2:]) for q, k in cut]
        for i in (0, 1):
            ctx.equal(torch.cat([p[i] for p in parts], 1), whole[i], f"heads over {tp} ranks")
    ctx.degrees = ctx.setting.tp
    return f"16 and 8 heads over {ctx.setting.tp}"


def cpu_bits(ctx: Context) -> str:
    for head_dim in ctx.setting.head_dims:
        arguments = [*_operands(37, head_dim), table_of(ctx, head_dim)]
        there = ctx.reference.rope(*arguments)
        for one, other in zip(ctx.subject.rope(*ctx.put(*arguments)), there, strict=True):
            ctx.equal(one, other, f"head_dim {head_dim}")
    return f"head_dim {ctx.setting.head_dims}"


def run_to_run(ctx: Context) -> str:
    arguments = ctx.put(*_operands(ctx.setting.repeat_rows, 64), table_of(ctx, 64))
    repeated(ctx, lambda: ctx.subject.rope(*arguments), "rope")
    return "four calls"


SUITE = OpSuite(
    name="rope",
    checks={
        "order": order,
        "value": value,
        "dtypes": dtypes,
        "shapes": shapes,
        "neighbours": beside,
        "tp_shards": tp_shards,
        "cpu_bits": cpu_bits,
        "run_to_run": run_to_run,
    },
    absent={
        "phases": "a token's angle is its position's; see neighbours",
        "tp_ranks": "nothing is added over ranks",
        "split_k": "there is no K",
        "kernel_table": "one launch for every size",
    },
    fault=(("rope", "order"),),
)
