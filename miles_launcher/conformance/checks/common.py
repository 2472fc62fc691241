"""Checks that read the same for every op whose result is rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from ..context import Check, Context
from ..properties import NotApplicable


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSuite:
    """The claims of one op. Every property has a check, or a reason in `absent` (everywhere) or
    `absent_on_gpu`. `fault` names functions of the subject and the check that must see one ulp in
    their results."""

    name: str
    checks: Mapping[str, Check]
    absent: Mapping[str, str] = field(default_factory=dict)
    absent_on_gpu: Mapping[str, str] = field(default_factory=dict)
    fault: tuple[tuple[str, str], ...] = ()
    fault_on_gpu: tuple[tuple[str, str], ...] | None = None


def first(result: Any) -> torch.Tensor:
    """The op's result, or the first of several."""
    out: torch.Tensor = result if isinstance(result, torch.Tensor) else result[0]
    return out


def borders(
    ctx: Context, run: Callable[..., Any], inputs: Sequence[torch.Tensor], label: str
) -> None:
    """The first and the last m rows of a batch, for every m of the setting, have the bits that
    they have in the whole."""
    whole = first(run(*inputs))
    rows = whole.shape[0]
    for m in ctx.setting.rows:
        for cut in (slice(0, m), slice(rows - m, rows)):
            part = first(run(*(t[cut] for t in inputs)))
            ctx.equal(part, whole[cut].cpu(), f"{label}, rows {cut.start} to {cut.stop} alone")


def neighbours(
    ctx: Context, run: Callable[..., Any], inputs: Sequence[torch.Tensor], label: str
) -> str:
    """A row alone, in a shuffled batch, and beside rows of NaN, infinities and zeros."""
    whole = first(run(*inputs)).cpu()
    rows = whole.shape[0]
    chosen = sorted({0, 1 % rows, rows // 2, rows - 1})
    for row in chosen:
        alone = first(run(*(t[row : row + 1] for t in inputs)))
        ctx.equal(alone, whole[row : row + 1], f"{label}: row {row} alone")
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    shuffled = first(run(*(t[order.to(t.device)] for t in inputs)))
    ctx.equal(shuffled, whole[order], f"{label}: shuffled")
    for value in (float("nan"), float("inf"), 0.0):
        spoiled = [_spoiled(t, chosen, value) for t in inputs]
        beside = first(run(*spoiled))[chosen]
        ctx.equal(beside, whole[chosen], f"{label}: beside rows of {value}")
    return f"{rows} rows: alone, shuffled, beside NaN, infinity and zero"


def _spoiled(x: torch.Tensor, kept: list[int], value: float) -> torch.Tensor:
    if not x.is_floating_point():
        return x
    out = torch.full_like(x, value)
    out[kept] = x[kept]
    return out


def repeated(ctx: Context, run: Callable[[], Any], label: str) -> None:
    """Three calls, with other allocations and (on a CPU) another number of threads in between."""
    before = [t.cpu().clone() for t in _tensors(run())]
    threads = torch.get_num_threads()
    for attempt in range(3):
        kept = torch.full((1 << (12 + attempt),), 7.0, device=ctx.device)
        if not ctx.kernels:
            torch.set_num_threads(attempt + 1)
        try:
            again = _tensors(run())
        finally:
            torch.set_num_threads(threads)
        del kept
        for one, other in zip(again, before, strict=True):
            ctx.equal(one, other, f"{label}: call {attempt + 2}")


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def splits(entry: Any) -> int:
    """Over how many programs a table's entry splits K: the largest number in a field of that
    name, 1 where it has none."""
    if not is_dataclass(entry):
        return 1
    values = [getattr(entry, f.name) for f in fields(entry) if "split" in f.name]
    return max([1, *(v for v in values if isinstance(v, int))])


def no_split(name: str) -> NotApplicable:
    """What a `split_k` check raises where no entry of the op's table splits K."""
    return NotApplicable(f"no kernel of {name} splits K over programs")
