"""`temperature_logits`: a true fp32 division, never through bf16 and never by a reciprocal."""

from __future__ import annotations

import numpy as np
import torch

from ..bits import random
from ..context import Context, array
from ..oracle.numbers import bf16
from .common import OpSuite, borders, neighbours, repeated

BF16, FP32 = torch.bfloat16, torch.float32


def _operands(rows: int, dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    """Logits, and a temperature a row."""
    logits = random(rows, 301, seed=95, dtype=dtype, scale=9.0)
    return [logits, (0.3 + random(rows, 1, seed=96, dtype=FP32).abs())]


def order(ctx: Context) -> str:
    for dtype in (BF16, FP32):
        logits, temperature = _operands(19, dtype)
        wanted = array(logits) / array(temperature)
        out = ctx.subject.temperature_logits(*ctx.put(logits, temperature))
        ctx.equal(out, wanted, f"{dtype}, a temperature a row")
        for scalar in (0.7, 1.0, 1.3):
            one = torch.tensor(scalar)
            out = ctx.subject.temperature_logits(*ctx.put(logits, one))
            wanted = array(logits) / np.float32(scalar)
            ctx.equal(out, wanted, f"{dtype}, temperature {scalar}")
        reciprocal = array(logits) * (np.float32(1) / np.float32(1.3))
        ctx.shows(wanted, reciprocal, f"{dtype}: times the reciprocal")
        ctx.shows(wanted, bf16(wanted), f"{dtype}: through bf16")
    return "a temperature a row, and one for all; a reciprocal and bf16 differ"


def value(ctx: Context) -> str:
    logits, temperature = _operands(19)
    exact = logits.double() / temperature.double()
    out = ctx.subject.temperature_logits(*ctx.put(logits, temperature))
    share = ctx.near(out, exact, 2.0**-24 * exact.abs(), "temperature")
    return f"at most {share:.2f} of half an fp32 unit"


def dtypes(ctx: Context) -> str:
    for dtype in (BF16, FP32):
        out = ctx.subject.temperature_logits(*ctx.put(*_operands(3, dtype)))
        ctx.require(out.dtype == FP32, f"{dtype} logits gave {out.dtype}")
    return "bf16 and fp32 logits give fp32"


def shapes(ctx: Context) -> str:
    inputs = ctx.put(*_operands(max(ctx.setting.rows)))
    whole = ctx.subject.temperature_logits(*inputs)
    ctx.equal(whole, array(inputs[0]) / array(inputs[1]), f"{len(whole)} rows")
    borders(ctx, ctx.subject.temperature_logits, inputs, "temperature")
    turned = ctx.subject.temperature_logits(inputs[0].t().contiguous().t(), inputs[1])
    ctx.equal(turned, whole.cpu(), "strides")
    empty = ctx.subject.temperature_logits(inputs[0][:0], inputs[1][:0])
    ctx.require(empty.shape == (0, 301), f"no rows gave {tuple(empty.shape)}")
    return f"rows {ctx.setting.rows}, strides, no rows"


def beside(ctx: Context) -> str:
    inputs = ctx.put(*_operands(max(ctx.setting.rows)))
    return neighbours(ctx, ctx.subject.temperature_logits, inputs, "temperature")


def tp_shards(ctx: Context) -> str:
    logits, temperature = ctx.put(*_operands(7))
    whole = ctx.subject.temperature_logits(logits, temperature).cpu()
    for tp in ctx.setting.tp:
        parts = [ctx.subject.temperature_logits(x, temperature) for x in logits.chunk(tp, 1)]
        ctx.equal(torch.cat(parts, 1), whole, f"columns over {tp} ranks")
    ctx.degrees = ctx.setting.tp
    return f"columns over {ctx.setting.tp}"


def cpu_bits(ctx: Context) -> str:
    inputs = _operands(129)
    there = ctx.reference.temperature_logits(*inputs)
    ctx.equal(ctx.subject.temperature_logits(*ctx.put(*inputs)), there, "temperature")
    return "129 rows"


def run_to_run(ctx: Context) -> str:
    inputs = ctx.put(*_operands(ctx.setting.repeat_rows))
    repeated(ctx, lambda: ctx.subject.temperature_logits(*inputs), "temperature")
    return "four calls"


SUITE = OpSuite(
    name="temperature",
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
        "kernel_table": "PyTorch's division, no kernel of ours",
    },
    fault=(("temperature_logits", "order"),),
)
