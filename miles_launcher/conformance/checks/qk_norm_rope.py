"""`qk_norm_rope`: the norm of every head, then its rotation, with the roundings of both ops."""

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
EPS = 1e-6
_GROUPS, _PER_GROUP = 3, 3


def _weights(head_dim: int) -> list[torch.Tensor]:
    """Of query and key; neither is one."""
    return [1.0 + random(head_dim, seed=n, dtype=FP32, scale=0.3) for n in (76, 77)]


def _operands(tokens: int, head_dim: int, *, grouped: bool = False) -> list[torch.Tensor]:
    """Query and key inside one fused projection, as the engine has it (all queries, then all keys)
    or as the trainer has it (group by group), the two weights, and positions, most beyond 4096."""
    heads = _GROUPS * (_PER_GROUP + 2)
    fused = random(tokens, heads * head_dim, seed=75)
    if grouped:
        rows = fused.view(tokens, _GROUPS, _PER_GROUP + 2, head_dim)
        query, key = rows[:, :, :_PER_GROUP], rows[:, :, _PER_GROUP]
    else:
        cut = fused.view(tokens, heads, head_dim)
        count = _GROUPS * _PER_GROUP
        query, key = cut[:, :count], cut[:, count : count + _GROUPS]
    return [query, key, *_weights(head_dim), (torch.arange(tokens) * 977 + 3) % POSITIONS]


def _wanted(x: torch.Tensor, weight: torch.Tensor, angles: torch.Tensor) -> Array:
    half = x.shape[-1] // 2
    heads = array(x.reshape(x.shape[0], -1, x.shape[-1]))
    normalised = oracle.rms_norm(heads, array(weight), None, EPS)[0]
    return oracle.rope(normalised, array(angles)[:, :half], array(angles)[:, half:], "bfloat16")


def _run(ctx: Context, operands: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, query_weight, key_weight, positions = ctx.put(*operands)
    (table,) = ctx.put(table_of(ctx, query.shape[-1]))
    out: tuple[torch.Tensor, torch.Tensor] = ctx.subject.qk_norm_rope(
        query, key, query_weight, key_weight, EPS, positions, table
    )
    return out


def _compare(
    ctx: Context, operands: list[torch.Tensor], label: str
) -> tuple[torch.Tensor, torch.Tensor]:
    out = _run(ctx, operands)
    angles = table_of(ctx, operands[0].shape[-1])[operands[4]]
    for found, x, weight in zip(out, operands[:2], operands[2:4], strict=True):
        ctx.require(found.dtype == BF16, f"{label}: {found.dtype}")
        ctx.equal(found, _wanted(x, weight, angles), label)
    return out


def order(ctx: Context) -> str:
    for head_dim in ctx.setting.head_dims:
        for grouped in (False, True):
            operands = _operands(37, head_dim, grouped=grouped)
            out, _ = _compare(ctx, operands, f"head_dim {head_dim}, grouped {grouped}")
            query, weight = array(operands[0].reshape(37, -1, head_dim)), array(operands[2])
            half, angles = head_dim // 2, table_of(ctx, head_dim)[operands[4]]
            stages = oracle.rms_norm(query, np.ones_like(weight), None, EPS)[0] * weight
            once = oracle.rope(stages, array(angles)[:, :half], array(angles)[:, half:], "bfloat16")
            ctx.shows(out, once, f"head_dim {head_dim}: no rounding between norm and rotation")
            one_angle = _wanted(operands[0], operands[3], angles)
            ctx.shows(out, one_angle, f"head_dim {head_dim}: the key's weight")
    return f"head_dim {ctx.setting.head_dims}, both layouts; without the rounding between differs"


def value(ctx: Context) -> str:
    worst = 0.0
    for head_dim in ctx.setting.head_dims:
        operands = _operands(37, head_dim)
        x, weight = operands[0].double(), operands[2].double()
        cos, sin = table_of(ctx, head_dim)[operands[4]].double()[:, None].chunk(2, -1)
        exact = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
        a, b = exact.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        # Two roundings of what is rotated, one of the result; all else is fp32.
        parts = ((a * cos).abs() + (b * sin).abs(), (b * cos).abs() + (a * sin).abs())
        bound = 2.0**-7 * 1.01 * torch.cat(parts, -1) + 2.0**-8 * 1.01 * turned.abs()
        worst = max(worst, ctx.near(_run(ctx, operands)[0], turned, bound, f"{head_dim}"))
    return f"at most {worst:.2f} of three bf16 half units"


def dtypes(ctx: Context) -> str:
    query, key, *weights, positions = _operands(5, 64)
    narrow = [query, key, *(w.to(BF16) for w in weights), positions.to(torch.int32)]
    _compare(ctx, [*narrow[:4], positions], "bf16 weights")
    whole = _run(ctx, [*narrow[:4], positions])[0].cpu()
    ctx.equal(_run(ctx, narrow)[0], whole, "int32 positions")
    ctx.refused(lambda: _run(ctx, [query.float(), key.float(), *weights, positions]), "fp32 heads")
    ctx.refused(lambda: _run(ctx, [query, key, *weights, positions[:-1]]), "too few positions")
    ctx.refused(lambda: _run(ctx, [query, key, weights[0][:-2], weights[1], positions]), "a weight")
    moved = ctx.put(query, key, *weights)
    (there, table) = ctx.put(positions, table_of(ctx, 64))
    op = ctx.subject.qk_norm_rope
    ctx.refused(lambda: op(*moved, EPS, there, table.to(BF16)), "a bf16 table")
    return "weights bf16 and fp32, positions int32 and int64; fp32 heads and a cast table refused"


def shapes(ctx: Context) -> str:
    head_dim = ctx.setting.head_dims[0]
    for tokens in ctx.setting.rows:
        for grouped in (False, True):
            operands = _operands(tokens, head_dim, grouped=grouped)
            _compare(ctx, operands, f"{tokens} tokens, grouped {grouped}")
    for heads, kv_heads in ((1, 1), (40, 8), (33, 3)):
        query, key = (random(3, n, head_dim, seed=n) for n in (heads, kv_heads))
        operands = [query, key, *_weights(head_dim), torch.tensor([0, 1, 4097])]
        _compare(ctx, operands, f"{heads} and {kv_heads} heads")
    empty = _operands(2, head_dim)
    none = _run(ctx, [*(t[:0] for t in empty[:2]), *empty[2:4], empty[4][:0]])
    ctx.require(none[0].shape == (0, 9, head_dim), f"no tokens gave {tuple(none[0].shape)}")
    return f"tokens {ctx.setting.rows}, both layouts, heads 1 to 40, no tokens"


def beside(ctx: Context) -> str:
    head_dim = ctx.setting.head_dims[0]
    query, key, *weights, positions = ctx.put(*_operands(max(ctx.setting.rows), head_dim))
    (table,) = ctx.put(table_of(ctx, head_dim))

    def run(q: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = ctx.subject.qk_norm_rope(q, k, *weights, EPS, p, table)[0]
        return out

    return neighbours(ctx, run, [query, key, positions], "qk_norm_rope")


def tp_shards(ctx: Context) -> str:
    tokens, head_dim = 5, ctx.setting.head_dims[0]
    query, key = random(tokens, 16, head_dim, seed=78), random(tokens, 8, head_dim, seed=79)
    rest = [*_weights(head_dim), torch.arange(tokens) * 1000]
    whole = [t.cpu() for t in _run(ctx, [query, key, *rest])]
    for tp in ctx.setting.tp:
        cut = zip(query.chunk(tp, 1), key.chunk(tp, 1), strict=True)
        parts = [_run(ctx, [q, k, *rest]) for q, k in cut]
        for i in (0, 1):
            ctx.equal(torch.cat([p[i] for p in parts], 1), whole[i], f"heads over {tp} ranks")
    ctx.degrees = ctx.setting.tp
    return f"16 and 8 heads over {ctx.setting.tp}"


def cpu_bits(ctx: Context) -> str:
    """The two ops one after the other, which is what runs where somebody looks between them."""
    for head_dim in ctx.setting.head_dims:
        operands = _operands(37, head_dim)
        table = table_of(ctx, head_dim)
        query, key = (
            ctx.reference.rms_norm(x, w, EPS)[0]
            for x, w in zip(operands[:2], operands[2:4], strict=True)
        )
        there = ctx.reference.rope(query, key, operands[4], table)
        for one, other in zip(_run(ctx, operands), there, strict=True):
            ctx.equal(one, other, f"head_dim {head_dim}")
    return f"head_dim {ctx.setting.head_dims}: those of rms_norm and rope, one after the other"


def run_to_run(ctx: Context) -> str:
    operands = _operands(ctx.setting.repeat_rows, ctx.setting.head_dims[0])
    repeated(ctx, lambda: _run(ctx, operands), "qk_norm_rope")
    return "four calls"


SUITE = OpSuite(
    name="qk_norm_rope",
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
        "split_k": "a head is one program's",
        "kernel_table": "one launch for every size",
    },
    fault=(("qk_norm_rope", "order"),),
)
