"""`silu_mul`: fp32 inside, one rounding at the end."""

from __future__ import annotations

import numpy as np
import torch

from ..bits import random
from ..context import Context, array
from ..oracle import rows as oracle
from ..oracle.numbers import bf16
from .common import OpSuite, borders, neighbours, repeated

BF16, FP32 = torch.bfloat16, torch.float32


def _gate_up(rows: int, width: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    x = random(rows, 2 * width, seed=81, dtype=dtype, scale=4.0)
    x[0, :6] = torch.tensor([0.0, -0.0, 90.0, -90.0, 3e4, -3e4])
    return x


def _compare(ctx: Context, x: torch.Tensor, label: str) -> torch.Tensor:
    out: torch.Tensor = ctx.subject.silu_mul(*ctx.put(x))
    ctx.require(out.dtype == x.dtype, f"{label}: {out.dtype}")
    name = str(x.dtype).removeprefix("torch.")
    ctx.equal(out, oracle.silu_mul(array(x), ctx.exp, name), label)
    return out


def order(ctx: Context) -> str:
    for width in ctx.setting.widths:
        for dtype in (BF16, FP32):
            x = _gate_up(19, width, dtype)
            out = _compare(ctx, x, f"width {width}, {dtype}")
            gate, up = array(x)[:, :width], array(x)[:, width:]
            e = ctx.exp(-np.abs(gate))
            sigmoid = np.where(gate >= 0, np.float32(1), e) / (np.float32(1) + e)
            if dtype == BF16:
                ctx.shows(out, bf16(bf16(gate * sigmoid) * up), f"width {width}: two roundings")
            else:
                ctx.shows(out, gate * (sigmoid * up), f"width {width}: the product first")
    return f"widths {ctx.setting.widths}, bf16 and fp32; two roundings and another product differ"


def value(ctx: Context) -> str:
    worst = 0.0
    for dtype, half_unit in ((BF16, 2.0**-8), (FP32, 2.0**-24)):
        x = _gate_up(19, ctx.setting.widths[-1], dtype)
        gate, up = x.double().chunk(2, -1)
        exact = gate * torch.sigmoid(gate) * up
        # The exponential within two ulps; sum, quotient and two products half a unit each.
        bound = exact.abs() * (half_unit + 2.0**-21) + 1e-30
        out = ctx.subject.silu_mul(*ctx.put(x))
        worst = max(worst, ctx.near(out, exact, bound, f"{dtype}"))
    return f"at most {worst:.2f} of half a unit + 2^-21"


def dtypes(ctx: Context) -> str:
    for dtype in (BF16, FP32):
        _compare(ctx, _gate_up(3, 72, dtype), f"{dtype}")
    ctx.refused(lambda: ctx.subject.silu_mul(*ctx.put(_gate_up(3, 72)[:, :-1])), "an odd width")
    return "bf16 and fp32; an odd width refused"


def shapes(ctx: Context) -> str:
    for width in (3, *ctx.setting.widths):
        x = _gate_up(max(ctx.setting.rows), width)
        out = _compare(ctx, x, f"width {width}")
        borders(ctx, ctx.subject.silu_mul, ctx.put(x), f"width {width}")
        (wide,) = ctx.put(torch.cat((x, x), 1))
        ctx.equal(ctx.subject.silu_mul(wide[:, : 2 * width]), out.cpu(), f"width {width}: strides")
        batched = ctx.subject.silu_mul(*ctx.put(x[:4].view(2, 2, -1))).reshape(4, -1)
        ctx.equal(batched, out[:4].cpu(), f"width {width}: batched")
        empty = ctx.subject.silu_mul(wide[:0, : 2 * width])
        ctx.require(empty.shape == (0, width), f"no rows gave {tuple(empty.shape)}")
    return f"rows {ctx.setting.rows}, widths 3 and {ctx.setting.widths}, strides, no rows"


def beside(ctx: Context) -> str:
    x = ctx.put(_gate_up(max(ctx.setting.rows), ctx.setting.widths[0]))
    return neighbours(ctx, ctx.subject.silu_mul, x, "silu_mul")


def tp_shards(ctx: Context) -> str:
    width = 8 * 13
    (x,) = ctx.put(_gate_up(7, width))
    whole = ctx.subject.silu_mul(x).cpu()
    for tp in ctx.setting.tp:
        cut = zip(x[:, :width].chunk(tp, 1), x[:, width:].chunk(tp, 1), strict=True)
        parts = [ctx.subject.silu_mul(torch.cat(pair, 1)) for pair in cut]
        ctx.equal(torch.cat(parts, 1), whole, f"columns over {tp} ranks")
    ctx.degrees = ctx.setting.tp
    return f"{width} columns over {ctx.setting.tp}"


def cpu_bits(ctx: Context) -> str:
    for dtype in (BF16, FP32):
        x = _gate_up(19, ctx.setting.widths[-1], dtype)
        ctx.equal(ctx.subject.silu_mul(*ctx.put(x)), ctx.reference.silu_mul(x), f"{dtype}")
    return f"width {ctx.setting.widths[-1]}, bf16 and fp32"


def run_to_run(ctx: Context) -> str:
    x = ctx.put(_gate_up(ctx.setting.repeat_rows, ctx.setting.widths[-1]))
    repeated(ctx, lambda: ctx.subject.silu_mul(*x), "silu_mul")
    return "four calls"


SUITE = OpSuite(
    name="silu_mul",
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
        "phases": "a row has no phase here; see neighbours",
        "tp_ranks": "nothing is added over ranks",
        "split_k": "there is no K",
        "kernel_table": "one launch for every size",
    },
    fault=(("silu_mul", "order"),),
)
