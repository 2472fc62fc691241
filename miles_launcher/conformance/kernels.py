"""The ops of a GPU, with every entry of every kernel table. Imports Triton."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from . import probe_kernels
from .attention_entries import attention_entries, run_attention
from .checks.row_linear_cases import V1, V2
from .subject import Fitted, Subject, Table, cpu_subject


def kernel_module(op: str) -> ModuleType:
    """The op's `kernel.py` (the package's attribute of that name may be the public op)."""
    return importlib.import_module(f"sglang_patch.ops.{op}.kernel")


def table_entries(op: str) -> tuple[Any, ...]:
    """Every entry of every kernel table of an op: the module's tuples whose name has TILES.

    The op's launcher takes any of them as `tile`; one with a number above 1 in a field whose name
    has `split` splits K over programs.
    """
    found: list[Any] = []
    for name, value in vars(kernel_module(op)).items():
        if "TILES" in name and isinstance(value, tuple):
            found += [entry for entry in value if entry not in found]
    return tuple(found)


def _run_linear(entry: Any, *arguments: Any) -> torch.Tensor:
    out: torch.Tensor = kernel_module("linear").launch_linear(*arguments, tile=entry)
    return out


def _run_row_linear(entry: Any, *arguments: Any) -> torch.Tensor:
    out: torch.Tensor = kernel_module("row_linear").launch_row_linear_partial(
        *arguments, tile=entry
    )
    return out


def _run_add_rms_norm(entry: Any, *arguments: Any) -> Any:
    return kernel_module("rms_norm").launch_add_rms_norm(*arguments, tile=entry)


def kernel_subject(base: Subject | None = None) -> Subject:
    """The public ops, which run the kernels on a GPU's tensors; `base` in their place where
    something else makes them do so."""
    return replace(
        base or cpu_subject(),
        exp=probe_kernels.exp,
        log=probe_kernels.log,
        pair_sum=probe_kernels.pair_sum,
        sqrt=None,
        tables=(
            ("linear", Table(entries=table_entries("linear"), run=_run_linear)),
            ("row_linear", Table(entries=table_entries("row_linear"), run=_run_row_linear)),
            ("rms_norm", Table(entries=table_entries("rms_norm"), run=_run_add_rms_norm)),
            ("attention", Table(entries=attention_entries(), run=run_attention)),
        ),
        fitted=_fitted(),
    )


def _fitted() -> tuple[tuple[str, Fitted], ...]:
    """The entries for Hopper GPUs, where there is one."""
    from . import hopper, hopper_tiles

    if not hopper.is_hopper():
        return ()
    found = []
    for contract, module in ((V1, hopper_tiles), (V2, hopper)):
        cases = module.entries()
        splitting = tuple(case for case in cases if module.splits(case))
        fitted = Fitted(entries=tuple(cases), splitting=splitting, compare=module.compare_all)
        found.append((contract, fitted))
    return tuple(found)
