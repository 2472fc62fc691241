"""`row_linear`'s kernel table, its split-K entries, and the CPU's bits."""

from __future__ import annotations

import torch

from ..bits import random
from ..context import Context, array
from ..oracle import products
from ..oracle.numbers import Array, bf16
from ..properties import Mismatch, NotShown
from .common import no_split, splits
from .row_linear_cases import COLUMNS, V1, V2, Case, cases, operands, random_operands, whole


def _plan(case: Case) -> tuple[int, int, torch.dtype]:
    """(leaves, run, leaf dtype): what the kernel is told, worked out here."""
    count = case.leaf_count()
    if case.contract == V1:
        return count, products.first_of(count), torch.bfloat16
    return count, min(2, count), torch.float32


def _one_rank(case: Case, x: torch.Tensor, weight: torch.Tensor) -> Array:
    """The sum in the leaf format, before the bias and the last rounding."""
    parts = products.leaves(array(x), array(weight), case.leaf_count())
    if case.contract == V1:
        return products.runs_then_tree([bf16(p) for p in parts], "bfloat16")
    return products.tree(parts, "float32")


def _compare(ctx: Context, contract: str, entries: list[object], one_pass: object) -> None:
    """Each entry against the oracle where only the order of the leaves decides, and on random
    numbers against `one_pass`, at every number of rows."""
    table = ctx.subject.table("row_linear")
    assert table is not None
    for case in (c for c in cases(ctx, contract) if c.rollout_tp == 1):
        x, weight, _ = operands(ctx, case, 33)
        expected = _one_rank(case, x, weight)
        for entry in entries:
            out = table.run(entry, *ctx.put(x, weight), *_plan(case))
            ctx.equal(out, expected, f"{case}, {entry}")
    case = Case(contract, ctx.setting.row_k_sizes[-1])
    rows = max(ctx.setting.rows)
    columns = max(COLUMNS, ctx.setting.columns)
    x, weight = ctx.put(random(rows, case.k_size, seed=26), random(columns, case.k_size, seed=27))
    expected_here = table.run(one_pass, x, weight, *_plan(case)).cpu()
    for entry in entries:
        for m in ctx.setting.rows:
            out = table.run(entry, x[:m], weight, *_plan(case))
            ctx.equal(out, expected_here[:m], f"{case}, {m} rows, {entry}")


def kernel_table(ctx: Context, contract: str) -> str:
    table = ctx.subject.table("row_linear")
    if table is None or not table.entries:
        raise NotShown("the subject brings no kernel table")
    _compare(ctx, contract, list(table.entries), None)
    # One segment is the plain product: no price for a layout that cuts nothing.
    x, weight = ctx.put(*random_operands(Case(V2, ctx.setting.row_k_sizes[0], segments=1), 33)[:2])
    plain = ctx.subject.linear(x, weight, out_dtype="float32").cpu()
    for entry in table.entries:
        out = table.run(entry, x, weight, 1, 1, torch.float32)
        ctx.equal(out, plain, f"one segment against linear, {entry}")
    text = f"{len(table.entries)} entries, rows {ctx.setting.rows}"
    return text + _fitted(ctx, contract, splitting=False)


def _fitted(ctx: Context, contract: str, *, splitting: bool) -> str:
    """The contract's entries that are fitted to a shape."""
    fitted = dict(ctx.subject.fitted).get(contract)
    if fitted is None:
        return ""
    cases = [e for e in fitted.entries if (e in fitted.splitting) == splitting]
    try:
        compared = fitted.compare(cases)
    except AssertionError as error:
        raise Mismatch(str(error)) from None
    ctx.require(compared > 0, "no output of a fitted entry was compared")
    return f"; {len(cases)} fitted to the shape, {compared} outputs"


def split_k(ctx: Context, contract: str) -> str:
    table = ctx.subject.table("row_linear")
    entries = [e for e in table.entries if splits(e) > 1] if table else []
    if table is not None and not entries:
        text = _fitted(ctx, contract, splitting=True)
        if text:
            return text.removeprefix("; ")
    if table is None or not entries:
        raise no_split("row_linear")
    one_pass = next(e for e in table.entries if splits(e) == 1)
    _compare(ctx, contract, entries, one_pass)
    return f"{len(entries)} entries against the oracle and the one-pass kernel"


def cpu_bits(ctx: Context, contract: str) -> str:
    chosen = cases(ctx, contract)
    for case in chosen:
        x, weight, bias = operands(ctx, case, 5)
        here = whole(ctx, case, x, weight, bias)
        there = ctx.reference.row_linear(x, weight, bias, reduction=case.reduction())
        ctx.equal(here, there, f"{case}")
    return f"{len(chosen)} sums whose leaves are exact"
