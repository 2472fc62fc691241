"""`linear`: one accumulator, k increasing, the bias in fp32, one rounding."""

from __future__ import annotations

import torch

from ..bits import random, small_integers
from ..context import Context, array
from ..oracle import products
from ..properties import NotShown
from .common import OpSuite, borders, neighbours, no_split, repeated, splits

BF16, FP32 = torch.bfloat16, torch.float32
_DTYPES = ("bfloat16", "float32")


def product_bound(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far from fp64 a sum of K products may be: 2 sqrt(K) units in the last place of the sum
    of magnitudes, the probabilistic bound of Higham & Mary (2019) with twice its constant for a
    tensor core that cuts where it should round, and for bf16 half a unit of the result."""
    x, weight = x.cpu().double(), weight.cpu().double()
    bound = 2.0**-23 * x.shape[1] ** 0.5 * (x.abs() @ weight.abs().t())
    if dtype == BF16:
        bound = bound + 2.0**-8 * (x @ weight.t()).abs()
    return bound


def _operands(ctx: Context, rows: int, k_size: int) -> list[torch.Tensor]:
    n = ctx.setting.columns
    return [
        random(rows, k_size, seed=11),
        random(n, k_size, seed=12),
        random(n, seed=13, scale=4.0),
    ]


def order(ctx: Context) -> str:
    for k_size in ctx.setting.k_sizes:
        if ctx.exact_products:
            x, weight, bias = _operands(ctx, 5, k_size)
        else:
            # Sums of small integers are exact in any order; only bias and rounding are left.
            x, weight = (
                small_integers(5, k_size, 14),
                small_integers(ctx.setting.columns, k_size, 15),
            )
            bias = random(ctx.setting.columns, seed=13, scale=0.37)
        for dtype in _DTYPES:
            for b in (None, bias):
                moved = [None if t is None else t.to(ctx.device) for t in (x, weight, b)]
                out = ctx.subject.linear(*moved, out_dtype=dtype)
                ctx.require(str(out.dtype) == f"torch.{dtype}", f"{out.dtype}, not {dtype}")
                wanted = products.linear(
                    array(x), array(weight), None if b is None else array(b), dtype
                )
                ctx.equal(out, wanted, f"K {k_size}, {dtype}, {'no' if b is None else 'a'} bias")
        x, weight, bias = ctx.put(*_operands(ctx, 5, k_size))
        forwards = ctx.subject.linear(x, weight, bias, out_dtype="float32")
        backwards = ctx.subject.linear(x.flip(1), weight.flip(1), bias, out_dtype="float32")
        ctx.shows(forwards, backwards, f"K {k_size} backwards")
    inner = "k increasing" if ctx.exact_products else "k in the tensor core's order"
    return f"K {ctx.setting.k_sizes}: {inner}, bias in fp32, one rounding"


def value(ctx: Context) -> str:
    worst = 0.0
    for k_size in ctx.setting.k_sizes:
        x, weight, bias = _operands(ctx, 17, k_size)
        exact = x.double() @ weight.double().t() + bias.double()
        for dtype in _DTYPES:
            out = ctx.subject.linear(*ctx.put(x, weight, bias), out_dtype=dtype)
            bound = product_bound(x, weight, out.dtype) + 2.0**-8 * exact.abs() * (
                dtype == "bfloat16"
            )
            bound = bound + 2.0**-23 * exact.abs()
            worst = max(worst, ctx.near(out, exact, bound, f"K {k_size}, {dtype}"))
    return f"at most {worst:.2f} of 2^-23 sqrt(K) sum|x w| (+ half a bf16 unit)"


def dtypes(ctx: Context) -> str:
    x, weight, bias = ctx.put(*_operands(ctx, 3, 64))
    for dtype in _DTYPES:
        out = ctx.subject.linear(x, weight, bias, out_dtype=dtype)
        ctx.require(str(out.dtype) == f"torch.{dtype}", f"out_dtype {dtype} gave {out.dtype}")
    wide = ctx.subject.linear(x, weight, out_dtype="float32")
    ctx.equal(ctx.subject.linear(x, weight), wide.to(BF16).cpu(), "bf16 is the fp32 result rounded")
    linear = ctx.subject.linear
    ctx.refused(lambda: linear(x.float(), weight.float()), "fp32 operands (they would pass TF32)")
    ctx.refused(lambda: linear(x.half(), weight.half()), "fp16 operands")
    ctx.refused(lambda: linear(x, weight.float()), "operands of two formats")
    ctx.refused(lambda: linear(x, weight, out_dtype="float16"), "an fp16 result")
    ctx.refused(lambda: linear(x[:, :-1], weight), "operands of unequal K")
    return "bf16 in, bf16 and fp32 out; fp32, fp16 and mixtures refused"


def shapes(ctx: Context) -> str:
    rows = max(ctx.setting.rows)
    linear = ctx.subject.linear
    for k_size in ctx.setting.k_sizes:
        x, weight, _ = ctx.put(*_operands(ctx, rows, k_size))

        def run(part: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
            out: torch.Tensor = linear(part, weight, out_dtype="float32")
            return out

        if ctx.exact_products:
            wanted = products.linear(array(x), array(weight), None, "float32")
            ctx.equal(run(x), wanted, f"K {k_size}, {rows} rows")
        borders(ctx, run, [x], f"K {k_size}")
        whole = run(x[:6]).cpu()
        wide = torch.cat((x[:6], x[:6]), 1)[:, :k_size]
        ctx.equal(run(wide, weight.t().contiguous().t()), whole, f"K {k_size}: strides")
        ctx.equal(run(x[:6].view(2, 3, k_size)).reshape(6, -1), whole, f"K {k_size}: batched")
    empty = linear(x[:0], weight)
    ctx.require(empty.shape == (0, weight.shape[0]), f"no rows gave {tuple(empty.shape)}")
    return f"rows {ctx.setting.rows}, K {ctx.setting.k_sizes}, strides, no rows"


def beside(ctx: Context) -> str:
    x, weight, bias = ctx.put(*_operands(ctx, max(ctx.setting.rows), ctx.setting.k_sizes[-1]))
    return neighbours(ctx, lambda part: ctx.subject.linear(part, weight, bias), [x], "linear")


def tp_shards(ctx: Context) -> str:
    x, weight, bias = ctx.put(*_operands(ctx, 19, ctx.setting.k_sizes[-1]))
    whole = ctx.subject.linear(x, weight, bias).cpu()
    for tp in ctx.setting.tp:
        pairs = zip(weight.chunk(tp), bias.chunk(tp), strict=True)
        parts = [ctx.subject.linear(x, w, b) for w, b in pairs]
        ctx.equal(torch.cat(parts, -1), whole, f"columns over {tp} ranks")
    ctx.degrees = ctx.setting.tp
    return f"columns cut over {ctx.setting.tp}"


def kernel_table(ctx: Context) -> str:
    table = ctx.subject.table("linear")
    if table is None or not table.entries:
        raise NotShown("the subject brings no kernel table")
    rows = max(ctx.setting.rows)
    for k_size in ctx.setting.k_sizes:
        x, weight, bias = ctx.put(*_operands(ctx, rows, k_size))
        for dtype in (BF16, FP32):
            whole = table.run(None, x, weight, bias, dtype).cpu()
            for entry in table.entries:
                for m in ctx.setting.rows:
                    out = table.run(entry, x[:m], weight, bias, dtype)
                    ctx.equal(out, whole[:m], f"K {k_size}, {m} rows, {dtype}, {entry}")
    return f"{len(table.entries)} entries over rows {ctx.setting.rows}, K {ctx.setting.k_sizes}"


def split_k(ctx: Context) -> str:
    table = ctx.subject.table("linear")
    entries = [e for e in table.entries if splits(e) > 1] if table else []
    if table is None or not entries:
        raise no_split("linear")
    x, weight, bias = ctx.put(*_operands(ctx, max(ctx.setting.rows), ctx.setting.k_sizes[-1]))
    one_pass = next(e for e in table.entries if splits(e) == 1)
    whole = table.run(one_pass, x, weight, bias, FP32).cpu()
    for entry in entries:
        ctx.equal(table.run(entry, x, weight, bias, FP32), whole, f"{entry}")
    return f"{len(entries)} entries"


def run_to_run(ctx: Context) -> str:
    x, weight, bias = ctx.put(*_operands(ctx, ctx.setting.repeat_rows, ctx.setting.k_sizes[-1]))
    repeated(ctx, lambda: ctx.subject.linear(x, weight, bias), "linear")
    return "four calls"


SUITE = OpSuite(
    name="linear",
    checks={
        "order": order,
        "value": value,
        "dtypes": dtypes,
        "shapes": shapes,
        "neighbours": beside,
        "tp_shards": tp_shards,
        "split_k": split_k,
        "kernel_table": kernel_table,
        "run_to_run": run_to_run,
    },
    absent={
        "phases": "a row has no phase here; see neighbours",
        "tp_ranks": "nothing is added over ranks",
        "cpu_bits": "the order inside a product is the tensor core's own",
    },
    fault=(("linear", "order"),),
)
