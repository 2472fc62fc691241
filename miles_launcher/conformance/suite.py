"""Running the checks: one result a cell of the table, op by property."""

from __future__ import annotations

import difflib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

from .checks import OPS, OpSuite
from .checks.rank_jobs import RANK_JOBS
from .context import Context, Target
from .properties import (
    KERNEL_ONLY,
    PROPERTIES,
    Mismatch,
    NotApplicable,
    NotShown,
    Result,
    Status,
)
from .ranks import RankRun
from .setting import Setting
from .subject import Subject, cpu_subject

Started = Callable[[str, str], None]


def select(names: Sequence[str]) -> tuple[str, ...]:
    """The ops of these names, all where none is given; `ValueError` listing the close ones."""
    for name in names:
        if name not in OPS:
            near = difflib.get_close_matches(name, OPS, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(f"unknown op {name!r}; {hint}the ops are {', '.join(OPS)}")
    return tuple(name for name in OPS if name in names) if names else tuple(OPS)


def absent(op: OpSuite, name: str, ctx: Context) -> str | None:
    """Why a property does not apply to an op here, or None."""
    reason = op.absent.get(name)
    if reason is None and ctx.kernels:
        reason = op.absent_on_gpu.get(name)
    if reason is None and not ctx.kernels:
        reason = KERNEL_ONLY.get(name)
    return reason


def run_suite(
    names: Sequence[str],
    *,
    target: Target,
    setting: Setting,
    subject: Subject | None = None,
    reference: Subject | None = None,
    started: Started = lambda op, name: None,
) -> Iterator[Result]:
    """Every property of the named ops, in the table's order. `started` is told of each check that
    is about to run. `subject` None: the public ops on this device."""
    if subject is None:
        subject = _subject(target)
    ranks = RankRun(tuple(name for name in names if name in RANK_JOBS))
    for name in names:
        op = OPS[name]
        for prop in PROPERTIES:
            ctx = Context(
                subject=subject,
                setting=setting,
                target=target,
                reference=reference or cpu_subject(),
            )
            reason = absent(op, prop, ctx)
            if reason is not None:
                yield Result(op=name, property=prop, status=Status.NOT_APPLICABLE, detail=reason)
                continue
            started(name, prop)
            yield cell(op, prop, ctx, ranks)


def _subject(target: Target) -> Subject:
    if target == "cpu":
        return cpu_subject()
    from .kernels import kernel_subject

    return kernel_subject()


def cell(op: OpSuite, prop: str, ctx: Context, ranks: RankRun) -> Result:
    """One property of one op, run and judged; never raises but for an interruption."""
    start = time.perf_counter()
    try:
        if prop == "fault":
            detail = _fault(op, ctx)
        elif prop == "tp_ranks":
            detail = ranks.check(ctx, op.name)
        else:
            detail = op.checks[prop](ctx)
        if not ctx.compared:
            raise Mismatch("zero elements were compared: nothing was shown")
        status = Status.OK
    except Mismatch as error:
        status, detail = Status.FAILED, str(error)
    except NotShown as error:
        status, detail, ctx.degrees = Status.NOT_SHOWN, str(error), error.degrees
    except NotApplicable as error:
        status, detail = Status.NOT_APPLICABLE, str(error)
    except Exception:  # whatever an op, a compiler or a process raises here is the finding
        status, detail = Status.FAILED, traceback.format_exc(limit=-4)
    return Result(
        op=op.name,
        property=prop,
        status=status,
        detail=detail,
        compared=ctx.compared,
        seconds=round(time.perf_counter() - start, 3),
        degrees=ctx.degrees,
    )


def _fault(op: OpSuite, ctx: Context) -> str:
    """Each function of the op one ulp off, and the check that has to see it."""
    faults = op.fault
    if ctx.kernels and op.fault_on_gpu is not None:
        faults = op.fault_on_gpu
    for function, prop in faults:
        faulty = ctx.with_subject(ctx.subject.with_fault(function))
        try:
            op.checks[prop](faulty)
        except Mismatch:
            ctx.compared += max(1, faulty.compared)
        else:
            raise Mismatch(f"one ulp in the result of {function} went unseen by {prop}")
    return "seen: " + ", ".join(f"{function} by {prop}" for function, prop in faults)
