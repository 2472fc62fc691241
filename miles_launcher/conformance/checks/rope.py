"""`rope_table`, made once on the CPU, and `rope`: four products and two sums, each rounded."""

from __future__ import annotations

import numpy as np
import torch

from ..bits import random
from ..context import Context, array
from ..oracle import rows as oracle
from ..oracle.numbers import Array
from .common import OpSuite, neighbours, repeated

BF16, FP32 = torch.bfloat16, torch.float32
BASE, POSITIONS = 1e6, 40960
_HEADS, _KV_HEADS = 9, 3


def _table(ctx: Context, head_dim: int) -> torch.Tensor:
    out: torch.Tensor = ctx.subject.rope_table(head_dim, POSITIONS, BASE)
    return out


def table_order(ctx: Context) -> str:
    """Every column follows from one fp32 frequency within two ulps of the true one: fp32 angle,
    its cosine and sine rounded once."""
    sample = np.unique(np.concatenate((np.arange(40), np.arange(4090, 4100), [8191, 40000, 40959])))
    for head_dim in ctx.setting.head_dims:
        table = array(_table(ctx, head_dim))
        half = head_dim // 2
        for i in range(half):
            true = float(np.longdouble(BASE) ** (-np.longdouble(2 * i) / head_dim))
            candidates = [np.float32(true)]
            for direction in (np.float32(0), np.float32(2)):
                step = np.float32(true)
                for _ in range(2):
                    step = np.nextafter(step, direction)
                    candidates.append(step)
            wanted = np.stack((table[sample, i], table[sample, half + i])).view(np.int32)
            fits = [f for f in candidates if np.array_equal(_column(f, sample), wanted)]
            ctx.require(len(fits) == 1, f"head_dim {head_dim}, column {i}: {len(fits)} frequencies")
            ctx.compared += wanted.size
    return f"head_dim {ctx.setting.head_dims}: each column is one fp32 frequency's, bit for bit"


def _column(frequency: np.float32, positions: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    angle = (positions.astype(np.float32) * frequency).astype(np.float64)
    return np.stack((np.cos(angle), np.sin(angle))).astype(np.float32).view(np.int32)


def table_value(ctx: Context) -> str:
    worst = 0.0
    for head_dim in ctx.setting.head_dims:
        half = head_dim // 2
        frequency = BASE ** -(torch.arange(half, dtype=torch.float64) * 2 / head_dim)
        angle = torch.arange(POSITIONS, dtype=torch.float64)[:, None] * frequency
        exact = torch.cat((angle.cos(), angle.sin()), 1)
        # The frequency within two ulps, the angle rounded once: 2.5 units of the angle.
        bound = torch.cat((angle, angle), 1) * 2.5 * 2.0**-23 + 2.0**-24
        worst = max(worst, ctx.near(_table(ctx, head_dim), exact, bound, f"head_dim {head_dim}"))
    return f"at most {worst:.2f} of 2.5 ulp of the angle, positions up to {POSITIONS - 1}"


def table_shapes(ctx: Context) -> str:
    for head_dim in ctx.setting.head_dims:
        table = _table(ctx, head_dim)
        ctx.require(table.shape == (POSITIONS, head_dim), f"shape {tuple(table.shape)}")
        for rows in (1, 63, 64, 65, 4097):
            short = ctx.subject.rope_table(head_dim, rows, BASE)
            ctx.equal(short, table[:rows], f"head_dim {head_dim}: the first {rows} positions")
    ctx.refused(lambda: ctx.subject.rope_table(7, 8, BASE), "an odd head_dim")
    return "a shorter table is the beginning of a longer one"


def table_dtypes(ctx: Context) -> str:
    """fp32 on the CPU, whatever the defaults of the process that makes it."""
    before = torch.get_default_dtype()
    expected = _table(ctx, 64)
    ctx.require(expected.dtype == FP32 and expected.device.type == "cpu", f"{expected.dtype}")
    torch.set_default_dtype(BF16)
    try:
        with torch.device(ctx.device):
            again = _table(ctx, 64)
    finally:
        torch.set_default_dtype(before)
    ctx.equal(again, expected, "with bf16 as the default format")
    return "fp32 on the CPU, also under a bf16 default and another default device"


def table_repeats(ctx: Context) -> str:
    repeated(ctx, lambda: _table(ctx, 128), "rope_table")
    return "four tables"


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
    table, name = _table(ctx, head_dim), str(dtype).removeprefix("torch.")
    out = ctx.subject.rope(*ctx.put(query, key, positions, table))
    for found, given in zip(out, (query, key), strict=True):
        ctx.require(found.dtype == dtype, f"{dtype} in, {found.dtype} out")
        ctx.equal(found, _wanted(given, positions, table, name), f"head_dim {head_dim}, {dtype}")


def order(ctx: Context) -> str:
    for head_dim in ctx.setting.head_dims:
        for dtype in (BF16, FP32):
            _compare(ctx, 37, head_dim, dtype)
        query, _, positions = _operands(37, head_dim, FP32)
        table = _table(ctx, head_dim)
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
        table, half = _table(ctx, head_dim), head_dim // 2
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
    (table,) = ctx.put(_table(ctx, 64))
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
    (table,) = ctx.put(_table(ctx, 64))
    empty = ctx.subject.rope(query[:0], key[:0], positions[:0], table)
    ctx.require(empty[0].shape == (0, _HEADS, 64), f"no tokens gave {tuple(empty[0].shape)}")
    return f"tokens {ctx.setting.rows}, head_dim 48 too, slices of a fused projection, no tokens"


def beside(ctx: Context) -> str:
    (table,) = ctx.put(_table(ctx, 64))
    inputs = ctx.put(*_operands(max(ctx.setting.rows), 64))
    return neighbours(ctx, lambda q, k, p: ctx.subject.rope(q, k, p, table), inputs, "rope")


def tp_shards(ctx: Context) -> str:
    tokens, head_dim = 5, ctx.setting.head_dims[0]
    query, key = random(tokens, 16, head_dim, seed=72), random(tokens, 8, head_dim, seed=73)
    moved = ctx.put(query, key, torch.arange(tokens) * 1000, _table(ctx, head_dim))
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
        arguments = [*_operands(37, head_dim), _table(ctx, head_dim)]
        there = ctx.reference.rope(*arguments)
        for one, other in zip(ctx.subject.rope(*ctx.put(*arguments)), there, strict=True):
            ctx.equal(one, other, f"head_dim {head_dim}")
    return f"head_dim {ctx.setting.head_dims}"


def run_to_run(ctx: Context) -> str:
    arguments = ctx.put(*_operands(129, 64), _table(ctx, 64))
    repeated(ctx, lambda: ctx.subject.rope(*arguments), "rope")
    return "four calls"


_ONE_TABLE = "one table on the CPU, for every rank and row"
TABLE_SUITE = OpSuite(
    name="rope_table",
    checks={
        "order": table_order,
        "value": table_value,
        "dtypes": table_dtypes,
        "shapes": table_shapes,
        "run_to_run": table_repeats,
    },
    absent={
        **dict.fromkeys(("neighbours", "phases", "tp_shards", "tp_ranks"), _ONE_TABLE),
        **dict.fromkeys(("split_k", "kernel_table", "cpu_bits"), "made on the CPU, no kernel"),
    },
    fault=(("rope_table", "order"),),
)
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
