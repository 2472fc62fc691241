"""`rms_norm`: the fp32 stream, the variance as a pair tree, rounded before the weight."""

from __future__ import annotations

import numpy as np
import torch

from ..bits import random
from ..context import Context, array
from ..oracle import rows as oracle
from ..oracle.numbers import bf16, pair_tree, running_sum
from ..properties import NotShown
from .common import OpSuite, borders, neighbours, repeated

BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-6


def _operands(rows: int, hidden: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    """x, weight (not one), residual."""
    return [
        random(rows, hidden, seed=61, dtype=dtype),
        1.0 + random(hidden, seed=62, dtype=FP32, scale=0.3),
        random(rows, hidden, seed=63, dtype=FP32, scale=3.0),
    ]


def _norm(
    ctx: Context, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    moved = [None if t is None else t.to(ctx.device) for t in (x, weight, residual)]
    out, stream = ctx.subject.rms_norm(moved[0], moved[1], EPS, residual=moved[2])
    return out, stream


def _compare(
    ctx: Context, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, label: str
) -> torch.Tensor:
    """Every result against the oracle; returns the output."""
    out, stream = _norm(ctx, x, weight, residual)
    other = None if residual is None else array(residual)
    wanted = oracle.rms_norm(array(x), array(weight), other, EPS)
    ctx.equal(out, wanted[0], f"{label}: output")
    ctx.require(out.dtype == BF16, f"{label}: {out.dtype}")
    ctx.require((stream is None) == (other is None), f"{label}: a stream and no residual, or none")
    if stream is not None:
        ctx.equal(stream, wanted[1], f"{label}: stream")
        ctx.require(stream.dtype == FP32, f"{label}: {stream.dtype}")
    return out


def order(ctx: Context) -> str:
    for hidden in ctx.setting.hidden:
        for dtype in (BF16, FP32):
            x, weight, residual = _operands(19, hidden, dtype)
            for other in (None, residual):
                label = f"hidden {hidden}, {dtype}, {'no' if other is None else 'a'} residual"
                out = _compare(ctx, x, weight, other, label)
            # Weight first, rounded once: the formula of the textbook, not the contract's.
            stream = array(x) + array(residual)
            mean = pair_tree(stream * stream) / np.float32(hidden)
            scale = (np.float32(1) / np.sqrt(mean + np.float32(EPS)))[:, None]
            ctx.shows(out, bf16(stream * scale * array(weight)), f"{label}: weight before rounding")
            squares = stream * stream
            ctx.shows(pair_tree(squares), running_sum(squares), f"{label}: a running sum")
    return f"hidden {ctx.setting.hidden}, with and without residual; two other orders differ"


def value(ctx: Context) -> str:
    worst = 0.0
    for hidden in ctx.setting.hidden:
        x, weight, residual = _operands(9, hidden)
        stream = x.double() + residual.double()
        exact = stream * (stream.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
        out, sums = _norm(ctx, x, weight, residual)
        assert sums is not None
        # Two roundings to bf16; all else is fp32.
        bound = 2.0**-7 * 1.01 * exact.abs()
        worst = max(worst, ctx.near(out, exact, bound, f"hidden {hidden}"))
        ctx.near(sums, stream, 2.0**-24 * stream.abs(), f"hidden {hidden}: stream")
    return f"at most {worst:.2f} of two bf16 half units; the stream of one fp32 half unit"


def dtypes(ctx: Context) -> str:
    for dtype in (BF16, FP32):
        for weight_dtype in (BF16, FP32):
            x, weight, residual = _operands(3, 128, dtype)
            _compare(ctx, x, weight.to(weight_dtype), residual, f"x {dtype}, weight {weight_dtype}")
    x, weight, residual = _operands(3, 128)
    ctx.refused(lambda: _norm(ctx, x.half(), weight, None), "fp16")
    ctx.refused(lambda: _norm(ctx, x, weight, residual.to(BF16)), "a bf16 residual")
    ctx.refused(lambda: _norm(ctx, x, weight[:-1], None), "a weight of another width")
    return "x and weight bf16 and fp32; fp16 and a bf16 residual refused"


def shapes(ctx: Context) -> str:
    rows = max(ctx.setting.rows)
    for hidden in ctx.setting.hidden:
        x, weight, residual = _operands(rows, hidden)
        _compare(ctx, x, weight, residual, f"{rows} x {hidden}")
        (w,) = ctx.put(weight)
        for inputs in ([x], [x, residual]):

            def run(*part: torch.Tensor, w: torch.Tensor = w) -> torch.Tensor:
                other = part[1] if len(part) > 1 else None
                out: torch.Tensor = ctx.subject.rms_norm(part[0], w, EPS, residual=other)[0]
                return out

            borders(ctx, run, ctx.put(*inputs), f"hidden {hidden}, {len(inputs)} inputs")
    fused, weight = random(rows, 10 * 64, seed=64), 1.0 + random(64, seed=65, scale=0.3)
    heads = fused[:, 2 * 64 : 6 * 64].view(rows, 4, 64)
    wanted = oracle.rms_norm(array(heads), array(weight), None, EPS)[0]
    (there, w) = ctx.put(fused, weight)
    sliced = there[:, 2 * 64 : 6 * 64].view(rows, 4, 64)
    ctx.equal(ctx.subject.rms_norm(sliced, w, EPS)[0], wanted, "heads inside a fused projection")
    empty = ctx.subject.rms_norm(sliced[:0], w, EPS)[0]
    ctx.require(empty.shape == (0, 4, 64), f"no rows gave {tuple(empty.shape)}")
    return f"rows {ctx.setting.rows}, hidden {ctx.setting.hidden}, per head, strides, no rows"


def beside(ctx: Context) -> str:
    x, weight, residual = ctx.put(*_operands(max(ctx.setting.rows), ctx.setting.hidden[-1]))

    def run(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = ctx.subject.rms_norm(x, weight, EPS, residual=residual)[0]
        return out

    return neighbours(ctx, run, [x, residual], "rms_norm")


def tp_shards(ctx: Context) -> str:
    """A rank normalises its own heads."""
    x, weight, _ = ctx.put(*_operands(11 * 16, 128))
    heads = x.view(11, 16, 128)
    whole = ctx.subject.rms_norm(heads, weight, EPS)[0].cpu()
    for tp in ctx.setting.tp:
        parts = [ctx.subject.rms_norm(h, weight, EPS)[0] for h in heads.chunk(tp, 1)]
        ctx.equal(torch.cat(parts, 1), whole, f"16 heads over {tp} ranks")
    ctx.degrees = ctx.setting.tp
    return f"16 heads over {ctx.setting.tp}"


def kernel_table(ctx: Context) -> str:
    """Every entry on its narrowest and its widest rows, and on rows of odd chunks."""
    table = ctx.subject.table("rms_norm")
    if table is None or not table.entries:
        raise NotShown("the subject brings no kernel table")
    for entry in table.entries:
        for hidden in sorted({8, min(entry.columns, 3 * entry.chunk - 8), entry.columns}):
            x, weight, residual = _operands(entry.height + 1, hidden)
            wanted = oracle.rms_norm(array(x), array(weight), array(residual), EPS)
            there = ctx.put(x, weight, residual)
            for found, written in zip(table.run(entry, *there, EPS), wanted, strict=True):
                ctx.equal(found, written, f"hidden {hidden}: {entry}")
    return f"{len(table.entries)} entries, each at up to three widths"


def cpu_bits(ctx: Context) -> str:
    for hidden in ctx.setting.hidden:
        x, weight, residual = _operands(33, hidden)
        there = ctx.reference.rms_norm(x, weight, EPS, residual=residual)
        for one, other in zip(_norm(ctx, x, weight, residual), there, strict=True):
            assert one is not None
            ctx.equal(one, other, f"hidden {hidden}")
    return f"hidden {ctx.setting.hidden}"


def run_to_run(ctx: Context) -> str:
    x, weight, residual = ctx.put(*_operands(ctx.setting.repeat_rows, ctx.setting.hidden[-1]))
    repeated(ctx, lambda: ctx.subject.rms_norm(x, weight, EPS, residual=residual), "rms_norm")
    return "four calls"


SUITE = OpSuite(
    name="rms_norm",
    checks={
        "order": order,
        "value": value,
        "dtypes": dtypes,
        "shapes": shapes,
        "neighbours": beside,
        "tp_shards": tp_shards,
        "kernel_table": kernel_table,
        "cpu_bits": cpu_bits,
        "run_to_run": run_to_run,
    },
    absent={
        "phases": "a row has no phase here; see neighbours",
        "tp_ranks": "nothing is added over ranks",
        "split_k": "a row is one program's",
    },
    fault=(("rms_norm", "order"),),
)
