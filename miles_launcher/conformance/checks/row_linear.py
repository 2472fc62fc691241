"""`row_linear` under both contracts: the order in which K's leaves, ranks and bias are added."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from ..context import Context, array
from ..oracle import products
from ..subject import RowReduction
from . import row_linear_kernels
from .common import OpSuite, borders, neighbours, repeated
from .linear import product_bound
from .row_linear_cases import (
    COLUMNS,
    V1,
    Case,
    cases,
    degrees,
    operands,
    random_operands,
    sharded,
    whole,
)

BF16, FP32 = torch.bfloat16, torch.float32


def order(ctx: Context, contract: str) -> str:
    shown = 0
    chosen = cases(ctx, contract)
    for case in chosen:
        x, weight, bias = operands(ctx, case, 33)
        out = whole(ctx, case, x, weight)
        ctx.equal(out, case.oracle(x, weight, None), f"{case}")
        ctx.equal(whole(ctx, case, x, weight, bias), case.oracle(x, weight, bias), f"{case}, bias")
        if case.rollout_tp == 1:
            part = ctx.subject.row_linear_partial(*ctx.put(x, weight), case.reduction(), 1)
            ctx.equal(part, case.total(x, weight, None), f"{case}, before the rounding")
        if contract == V1 and case.k_size // case.rollout_tp % products.TILE == 0:
            published(ctx, case, x, weight, bias)
        for other in case.other_orders(x, weight):
            ctx.shows(out, other, f"{case}")
            shown += 1
    ctx.require(shown > 0, "no case had another order to tell from")
    counts = [case.leaf_count() for case in chosen]
    return f"leaves {counts}; {shown} other orders gave other bits"


def published(
    ctx: Context, case: Case, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> None:
    """`matmul_tp_inv`: the same sums, of matrices and of sequences, whole and cut out."""
    x, weight, bias = ctx.put(x, weight, bias)
    rows, k_size = x.shape
    expected = case.total(x.cpu(), weight.cpu(), bias.cpu())
    ctx.equal(ctx.subject.matmul_tp_inv(x, weight.t(), bias), expected, f"{case}, published")
    for cut in (8, 1):  # rows at 16-byte addresses, and not
        wide = torch.zeros(rows, k_size + 16, dtype=BF16, device=x.device)
        wide[:, cut : cut + k_size] = x
        rows_of = wide[:, cut : cut + k_size].unflatten(0, (3, rows // 3))
        out = ctx.subject.matmul_tp_inv(rows_of, weight.t().contiguous(), bias)
        ctx.equal(out.flatten(0, 1), expected, f"{case}, published, sequences cut out at {cut}")


def value(ctx: Context, contract: str) -> str:
    worst = 0.0
    for case in cases(ctx, contract):
        x, weight, bias = random_operands(case, 9)
        exact = x.double() @ weight.double().t() + bias.double()
        bound = product_bound(x, weight, BF16) + 2.0**-8 * exact.abs()
        if contract == V1:
            # Every leaf and every sum of leaves is rounded to bf16: half a unit of what is there.
            sums = np.abs(np.stack(products.leaves(array(x), array(weight), case.leaf_count())))
            roundings = 2.0**-8 * (case.leaf_count() + 1) ** 0.5
            bound = bound + roundings * torch.from_numpy(sums).double().sum(0)
        out = whole(ctx, case, x, weight, bias)
        worst = max(worst, ctx.near(out, exact, bound, f"{case}"))
    leaves = ", bf16 roundings of the leaves" if contract == V1 else ""
    return f"at most {worst:.2f} of 2^-23 sqrt(K) sum|x w| + one bf16 unit{leaves}"


def dtypes(ctx: Context, contract: str) -> str:
    case = Case(contract, 1024)
    x, weight, bias = operands(ctx, case, 3)
    out = whole(ctx, case, x, weight, bias)
    ctx.require(out.dtype == BF16, f"{out.dtype}, not bfloat16")
    part = ctx.subject.row_linear_partial(*ctx.put(x, weight), case.reduction(), 1)
    leaf = BF16 if contract == V1 else FP32
    ctx.require(part.dtype == leaf, f"a rank's part is {part.dtype}, not {leaf}")
    ctx.refused(lambda: whole(ctx, case, x.float(), weight.float()), "fp32 operands")
    ctx.refused(lambda: whole(ctx, case, x.half(), weight.half()), "fp16 operands")
    ctx.refused(lambda: whole(ctx, case, x[:, :-8], weight[:, :-8]), "a K that is no share")
    partial = ctx.subject.row_linear_partial
    third = ctx.put(x[:, :128], weight[:, :128])
    ctx.refused(
        lambda: partial(*third, Case(contract, 384, segments=1).reduction(), 3), "three ranks"
    )
    return f"bf16 in and out, parts {leaf}; other formats, shares and degrees refused"


def shapes(ctx: Context, contract: str) -> str:
    rows = max(ctx.setting.rows)
    chosen = [Case(contract, k) for k in (*ctx.setting.row_k_sizes[:1], 8 * 76)]
    for case in chosen:
        x, weight, _ = operands(ctx, case, rows)
        moved, w = ctx.put(x, weight)
        reduction = case.reduction()

        def run(
            part: torch.Tensor, w: torch.Tensor = w, reduction: RowReduction = reduction
        ) -> torch.Tensor:
            out: torch.Tensor = ctx.subject.row_linear(part, w, reduction=reduction)
            return out

        ctx.equal(run(moved), case.oracle(x, weight, None), f"{case}, {rows} rows")
        moved, w = ctx.put(*random_operands(case, rows)[:2])
        borders(ctx, partial(run, w=w), [moved], f"{case}")
        wide = torch.cat((moved[:6], moved[:6]), 1)[:, : case.k_size]
        ctx.equal(run(wide, w.t().contiguous().t()), run(moved[:6], w).cpu(), f"{case}: strides")
        ctx.require(run(moved[:0]).shape == (0, COLUMNS), f"{case}: no rows")
    return f"rows {ctx.setting.rows}, K {[c.k_size for c in chosen]}, strides, no rows"


def beside(ctx: Context, contract: str) -> str:
    case = Case(contract, ctx.setting.row_k_sizes[0])
    x, weight, bias = ctx.put(*random_operands(case, max(ctx.setting.rows)))
    reduction = case.reduction()
    return neighbours(
        ctx,
        lambda part: ctx.subject.row_linear(part, weight, bias, reduction=reduction),
        [x],
        "row_linear",
    )


def tp_shards(ctx: Context, contract: str) -> str:
    seen: set[int] = set()
    for case in cases(ctx, contract):
        if case.rollout_tp > 1:
            continue
        x, weight, bias = operands(ctx, case, 19)
        expected = case.total(x, weight, bias)
        for tp in degrees(ctx, case):
            ctx.equal(sharded(ctx, case, x, weight, bias, tp), expected, f"{case}, tp {tp}")
            seen.add(tp)
        x, weight, bias = random_operands(case, 19)
        one = sharded(ctx, case, x, weight, bias, 1).cpu()
        for tp in degrees(ctx, case):
            parts = sharded(ctx, case, x, weight, bias, tp)
            ctx.equal(parts, one, f"{case}, tp {tp}, random numbers")
    missing = sorted(set(ctx.setting.tp) - seen)
    ctx.require(not missing, f"no case could be cut over {missing} ranks")
    ctx.degrees = tuple(sorted(seen))
    return f"degrees {sorted(seen)} wherever a rank has whole leaves"


def run_to_run(ctx: Context, contract: str) -> str:
    case = Case(contract, ctx.setting.row_k_sizes[-1])
    moved = ctx.put(*operands(ctx, case, ctx.setting.repeat_rows))
    repeated(ctx, lambda: ctx.subject.row_linear(*moved, reduction=case.reduction()), "row_linear")
    return "four calls"


def suite(name: str, contract: str) -> OpSuite:
    """The claims of one contract."""
    functions: dict[str, Callable[..., str]] = {
        "order": order,
        "value": value,
        "dtypes": dtypes,
        "shapes": shapes,
        "neighbours": beside,
        "tp_shards": tp_shards,
        "run_to_run": run_to_run,
        "split_k": row_linear_kernels.split_k,
        "kernel_table": row_linear_kernels.kernel_table,
        "cpu_bits": row_linear_kernels.cpu_bits,
    }
    return OpSuite(
        name=name,
        checks={name: partial(f, contract=contract) for name, f in functions.items()},
        absent={"phases": "a row has no phase here; see neighbours"},
        fault=(
            ("row_linear", "order"),
            ("row_linear_partial", "tp_shards"),
            *((("matmul_tp_inv", "order"),) if contract == V1 else ()),
        ),
    )
