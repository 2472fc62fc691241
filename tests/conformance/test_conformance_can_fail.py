"""Every check can fail: ops that are wrong in known ways, a table's wrong entry, empty checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mutations
import pytest
import torch
from mutations import MUTATIONS, Mutation

from miles_launcher.conformance.bits import one_ulp
from miles_launcher.conformance.checks import OPS, OpSuite
from miles_launcher.conformance.checks.rank_jobs import RANK_JOBS
from miles_launcher.conformance.context import Context, Target
from miles_launcher.conformance.properties import PROPERTIES, NotShown, Result, Status
from miles_launcher.conformance.ranks import RankRun
from miles_launcher.conformance.setting import SMALL
from miles_launcher.conformance.subject import Subject, Table, cpu_subject
from miles_launcher.conformance.suite import cell
from sglang_patch.ops.linear import reference as linear_reference
from sglang_patch.ops.row_linear import reference as row_linear_reference


def run(op: str, prop: str, subject: Subject, target: Target = "cpu") -> Result:
    ctx = Context(subject=subject, setting=SMALL, target=target, reference=cpu_subject())
    return cell(OPS[op], prop, ctx, RankRun(()))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_wrong_op_turns_its_property_red(mutation: Mutation) -> None:
    wrong = replace(cpu_subject(), **{mutation.field: mutation.function})
    result = run(mutation.op, mutation.prop, wrong)
    assert result.status is Status.FAILED, result
    # Red because of the numbers, not because the stand-in could not be called.
    assert "Traceback" not in result.detail, result.detail


def test_every_op_has_a_mutation() -> None:
    assert {m.op for m in MUTATIONS} == set(OPS)
    assert {m.prop for m in MUTATIONS} >= {"order", "value", "dtypes", "shapes", "neighbours"}


def test_an_op_that_drifts_is_seen_by_run_to_run() -> None:
    wrong = replace(cpu_subject(), linear=mutations.linear_that_drifts())
    assert run("linear", "run_to_run", wrong).status is Status.FAILED


def test_real_ranks_see_a_wrong_order_a_wrong_gather_and_a_bias_too_many() -> None:
    wrong = replace(
        cpu_subject(),
        tree_all_reduce=mutations.all_reduce_by_the_transport,
        gather_ranks=mutations.gather_in_another_order,
        row_linear=mutations.row_linear_bias_on_every_rank,
    )
    ctx = Context(subject=wrong, setting=SMALL, target="cpu", reference=cpu_subject())
    ranks = RankRun(tuple(RANK_JOBS))
    results = {name: cell(OPS[name], "tp_ranks", ctx, ranks) for name in RANK_JOBS}
    for name in ("tree_all_reduce", "row_linear_v1", "row_linear_v2"):
        assert results[name].status is Status.FAILED, results[name]
    for result in results.values():
        assert "Traceback" not in result.detail, result.detail


@dataclass(frozen=True)
class Tile:
    """An entry of a table that somebody may add."""

    name: str
    splits: int = 1
    wrong: bool = False


def _linear(entry: Tile | None, *arguments: Any) -> torch.Tensor:
    out = linear_reference.linear(*arguments)
    return one_ulp(out) if entry is not None and entry.wrong else out


def _row_linear(entry: Tile | None, *arguments: Any) -> torch.Tensor:
    out = row_linear_reference.partial(*arguments)
    return one_ulp(out) if entry is not None and entry.wrong else out


def _with_table(name: str, function: Callable[..., Any], *entries: Tile) -> Subject:
    return replace(cpu_subject(), tables=((name, Table(entries=entries, run=function)),))


@pytest.mark.parametrize(
    ("op", "name", "function"),
    [
        ("linear", "linear", _linear),
        ("row_linear_v1", "row_linear", _row_linear),
        ("row_linear_v2", "row_linear", _row_linear),
    ],
)
def test_each_entry_of_a_table_and_each_split_is_run(
    op: str, name: str, function: Callable[..., Any]
) -> None:
    plain, bad = Tile("plain"), Tile("bad", wrong=True)
    split, bad_split = Tile("split", splits=4), Tile("bad split", splits=4, wrong=True)
    good = _with_table(name, function, plain, split)
    for prop in ("kernel_table", "split_k"):
        assert run(op, prop, good, "interpreter").status is Status.OK
    assert run(
        op, "kernel_table", _with_table(name, function, plain, bad), "interpreter"
    ).status is (Status.FAILED)
    wrong = _with_table(name, function, plain, bad_split)
    assert run(op, "split_k", wrong, "interpreter").status is Status.FAILED
    none = run(op, "split_k", _with_table(name, function, plain), "interpreter")
    assert none.status is Status.NOT_APPLICABLE and "splits K" in none.detail
    absent = run(op, "kernel_table", cpu_subject(), "interpreter")
    assert absent.status is Status.NOT_SHOWN


@pytest.mark.parametrize(
    "op", [name for name, op in OPS.items() if "cpu_bits" in op.checks], ids=str
)
def test_another_device_s_bits_are_compared(op: str) -> None:
    suite = OPS[op]
    fields = {field for field, _ in suite.fault}
    field = {"row_linear_v1": "row_linear", "row_linear_v2": "row_linear"}.get(
        op, sorted(fields)[0]
    )
    if op == "log_softmax":
        field = "log_softmax"
    assert run(op, "cpu_bits", cpu_subject(), "interpreter").status is Status.OK
    wrong = run(op, "cpu_bits", cpu_subject().with_fault(field), "interpreter")
    assert wrong.status is Status.FAILED and "differ" in wrong.detail


def _suite(check: Callable[[Context], str], **keywords: Any) -> OpSuite:
    return OpSuite(name="none", checks={"order": check}, **keywords)


def _judged(op: OpSuite, prop: str = "order") -> Result:
    ctx = Context(subject=cpu_subject(), setting=SMALL, target="cpu", reference=cpu_subject())
    return cell(op, prop, ctx, RankRun(()))


def test_a_check_that_compares_nothing_has_failed() -> None:
    result = _judged(_suite(lambda ctx: "fine"))
    assert result.status is Status.FAILED and "zero elements" in result.detail

    def empty(ctx: Context) -> str:
        ctx.equal(torch.ones(0), torch.ones(0), "nothing")
        return "fine"

    assert "zero elements" in _judged(_suite(empty)).detail


def test_what_is_missing_is_not_shown_and_what_raises_has_failed() -> None:
    def missing(ctx: Context) -> str:
        raise NotShown("no GPU", (2,))

    result = _judged(_suite(missing))
    assert result.status is Status.NOT_SHOWN and result.degrees == (2,)

    def broken(ctx: Context) -> str:
        raise RuntimeError("illegal memory access")

    result = _judged(_suite(broken))
    assert result.status is Status.FAILED and "illegal memory access" in result.detail


def test_a_fault_that_no_check_sees_has_failed() -> None:
    def blind(ctx: Context) -> str:
        ctx.compared += 1
        return "fine"

    result = _judged(_suite(blind, fault=(("linear", "order"),)), "fault")
    assert result.status is Status.FAILED and "went unseen" in result.detail


def test_every_cell_has_a_check_or_a_reason() -> None:
    for name, op in OPS.items():
        for prop in PROPERTIES:
            reasons = [prop in op.absent, prop in op.checks]
            if prop == "fault":
                assert op.fault, name
            elif prop == "tp_ranks":
                assert (prop in op.absent) != (name in RANK_JOBS), name
            elif prop in ("cpu_bits", "kernel_table", "split_k"):
                assert sum(reasons) == 1, (name, prop)
            else:
                assert sum(reasons) == 1, (name, prop)
