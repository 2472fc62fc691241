"""exp, log, square root and the pair sum that every other op is made of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..bits import random
from ..context import Context, array
from ..oracle.numbers import Array, pair_tree, running_sum
from .common import OpSuite, neighbours, repeated

FP32 = torch.float32
_SMALLEST = -87.33654
_LENGTHS = (1, 2, 3, 7, 64, 100, 127, 128, 129)


def _arguments() -> torch.Tensor:
    """Arguments of exp: the whole range, around zero, and the borders."""
    return torch.cat(
        (
            torch.linspace(-110.0, 88.0, 40001),
            random(20000, seed=1, dtype=FP32, scale=1e-3),
            torch.tensor([0.0, -0.0, float("-inf"), _SMALLEST, -87.3366, 88.3]),
        )
    )


def _positive() -> torch.Tensor:
    """Arguments of log: normal numbers of every exponent, and around one."""
    exponents = 2.0 ** torch.linspace(-125.0, 126.0, 40001, dtype=torch.float64)
    near_one = 1.0 + random(20000, seed=2, dtype=FP32, scale=1e-2).double()
    return torch.cat((exponents, near_one)).float()


def _ulps(found: torch.Tensor, exact: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """Distance to the extended-precision value in units of the last place of the value."""
    unit = np.spacing(np.abs(exact.astype(np.float32))).astype(np.longdouble)
    return np.abs(array(found).astype(np.longdouble) - exact) / unit


def order(ctx: Context) -> str:
    """The sum is the written tree. exp and log have no order but their own text: their values are
    judged here, and a kernel's bits by `cpu_bits`."""
    for length in (*_LENGTHS, *ctx.setting.hidden):
        x = random(4, length, seed=length, dtype=FP32)
        out = ctx.subject.pair_sum(*ctx.put(x))
        wanted = pair_tree(array(x))
        ctx.equal(out, wanted, f"length {length}")
        if length >= 64:
            ctx.shows(wanted, running_sum(array(x)), f"length {length}: a running sum")
    return f"pair sums of {_LENGTHS} and {ctx.setting.hidden}; a running sum differs"


def value(ctx: Context) -> str:
    notes = []
    cases: list[tuple[str, Callable[..., torch.Tensor], torch.Tensor, float]] = [
        ("exp", ctx.subject.exp, _arguments(), 2.0),
        ("log", ctx.subject.log, _positive(), 3.0),
    ]
    if ctx.subject.sqrt is not None:
        cases.append(("sqrt", ctx.subject.sqrt, _positive(), 0.5))
    for name, function, x, limit in cases:
        out = function(*ctx.put(x)).cpu()
        with np.errstate(under="ignore", over="ignore"):
            exact = getattr(np, name)(array(x).astype(np.longdouble))
        # Below the smallest normal number exp is flushed to zero; that is a claim of its own.
        normal = array(x) >= np.float32(_SMALLEST)
        distance = _ulps(out, exact)[normal if name == "exp" else slice(None)]
        worst = float(distance.max())
        ctx.compared += distance.size
        ctx.require(worst <= limit, f"{name}: {worst:.2f} ulp from the value, bound {limit}")
        if name == "exp":
            small = out[torch.from_numpy(~normal)]
            ctx.require(bool((small == 0).all()) and small.numel() > 0, "exp must flush to zero")
        notes.append(f"{name} {worst:.2f} of {limit} ulp")
    x = random(4, 1000, seed=3, dtype=FP32)
    bound = 10 * 2.0**-24 * x.double().abs().sum(-1)
    ctx.near(ctx.subject.pair_sum(*ctx.put(x)), x.double().sum(-1), bound, "pair sum")
    return ", ".join(notes)


def shapes(ctx: Context) -> str:
    """An element has its bits wherever it stands: vector body, tail, or alone."""
    x = _arguments()[:4103]
    for name, function, argument in (
        ("exp", ctx.subject.exp, x),
        ("log", ctx.subject.log, _positive()[:4103]),
    ):
        (there,) = ctx.put(argument)
        whole = function(there).cpu()
        for length in (1, 3, 7, 8, 15, 16, 17, 63, 64, 65, 255, 256, 257, 4096, 4097):
            for cut in (slice(0, length), slice(len(argument) - length, len(argument))):
                part = function(there[cut].clone())
                ctx.equal(part, whole[cut], f"{name}: elements {cut.start} to {cut.stop}")
    row = random(1, 100, seed=4, dtype=FP32)
    expected = ctx.subject.pair_sum(*ctx.put(row)).cpu()
    for zeros in (1, 28, 29, 156):
        padded = torch.nn.functional.pad(row, (0, zeros))
        found = ctx.subject.pair_sum(*ctx.put(padded))
        ctx.equal(found, expected, f"pair sum and {zeros} zeros behind")
    return "1 to 4097 elements, from both ends; a row and zeros behind it"


def dtypes(ctx: Context) -> str:
    (x,) = ctx.put(random(64, seed=5, dtype=FP32).abs() + 0.1)
    for name, function in (("exp", ctx.subject.exp), ("log", ctx.subject.log)):
        ctx.require(function(x).dtype == FP32, f"{name} of fp32 gave {function(x).dtype}")
        if not ctx.kernels:
            wide = function(x.double())
            exact = getattr(torch, name)(x.double())
            ctx.near(wide, exact, 4 * 2.0**-52 * (1 + exact.abs()), f"{name} in fp64")
    special = torch.tensor([float("nan"), float("-inf"), 0.0])
    found = ctx.subject.exp(*ctx.put(special)).cpu()
    ctx.require(bool(found[0].isnan()) and found[1:].tolist() == [0.0, 1.0], f"exp: {found}")
    return "fp32, and fp64 on a CPU for gradchecks; NaN stays, exp(-inf) is 0"


def beside(ctx: Context) -> str:
    x = ctx.put(random(max(ctx.setting.rows), 130, seed=6, dtype=FP32))
    neighbours(ctx, ctx.subject.exp, x, "exp")
    neighbours(ctx, lambda t: ctx.subject.log(t.abs()), x, "log")
    return neighbours(ctx, ctx.subject.pair_sum, x, "pair sum")


def cpu_bits(ctx: Context) -> str:
    for name, x in (("exp", _arguments()), ("log", _positive())):
        there = getattr(ctx.reference, name)(x)
        ctx.equal(getattr(ctx.subject, name)(*ctx.put(x)), there, name)
        platform: Array = getattr(np, name)(array(x))
        ctx.shows(there, platform, f"{name}: the platform's own")
    for length in _LENGTHS:
        x = random(4, length, seed=length, dtype=FP32)
        there = ctx.reference.pair_sum(x)
        ctx.equal(ctx.subject.pair_sum(*ctx.put(x)), there, f"length {length}")
    return "exp and log of 60,000 arguments, pair sums; the platform's own exp and log differ"


def run_to_run(ctx: Context) -> str:
    (x,) = ctx.put(_arguments())
    repeated(ctx, lambda: ctx.subject.exp(x), "exp")
    repeated(ctx, lambda: ctx.subject.log(x.abs() + 0.1), "log")
    repeated(ctx, lambda: ctx.subject.pair_sum(x[:60000].view(6, -1)), "pair sum")
    return "four calls each"


SUITE = OpSuite(
    name="elementary",
    checks={
        "order": order,
        "value": value,
        "dtypes": dtypes,
        "shapes": shapes,
        "neighbours": beside,
        "cpu_bits": cpu_bits,
        "run_to_run": run_to_run,
    },
    absent={
        **dict.fromkeys(("phases", "tp_shards", "tp_ranks"), "one element or row at a time"),
        **dict.fromkeys(("split_k", "kernel_table"), "device functions, launched by other ops"),
    },
    fault=(("pair_sum", "order"), ("exp", "shapes"), ("log", "shapes")),
    fault_on_gpu=(("pair_sum", "order"), ("exp", "cpu_bits"), ("log", "cpu_bits")),
)
