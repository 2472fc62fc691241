"""The suite over the Triton kernels, in Triton's interpreter.

Not collected by name: `test_conformance_kernels.py` runs this file with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_conformance_kernels.py"

import bf16_interpreter

from miles_launcher.conformance.checks import OPS
from miles_launcher.conformance.kernels import kernel_subject
from miles_launcher.conformance.properties import Status
from miles_launcher.conformance.setting import SMALL
from miles_launcher.conformance.subject import Subject, cpu_subject
from miles_launcher.conformance.suite import run_suite

bf16_interpreter.install()

_REGISTERED = {
    "attention": ["attention"],
    "linear": ["linear"],
    "qk_norm_rope": ["qk_norm_rope"],
    "rms_norm": ["rms_norm", "add_rms_norm"],
    "log_softmax": ["segment_statistics", "token_statistics", "combine_segments", "log_softmax"],
    "logits_gradient": ["logits_gradient"],
    "rope": ["rope"],
    "row_linear": ["row_linear_partial"],
    "silu_mul": ["silu_mul"],
}
_here = threading.local()


def _either(reference: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The registered CPU implementation: the kernel, or inside `_plainly` the reference."""

    def run(*arguments: Any) -> Any:
        return (reference if getattr(_here, "plain", False) else kernel)(*arguments)

    return run


for folder, names in _REGISTERED.items():
    # The package's attribute of the folder's name may be the public op.
    module = importlib.import_module(f"sglang_patch.ops.{folder}.op")
    for op in (getattr(module, f"_{name}") for name in names):
        op.register_kernel("cpu")(_either(op._backend_fns["cpu"], op._backend_fns["cuda"]))


def _plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **keywords: Any) -> Any:
        _here.plain = True
        try:
            return function(*arguments, **keywords)
        finally:
            _here.plain = False

    return run


def reference() -> Subject:
    """The public ops with the references behind them."""
    subject = cpu_subject()
    names = [f.name for f in fields(subject) if f.name not in ("tables", "fitted")]
    return replace(subject, **{name: _plainly(getattr(subject, name)) for name in names})


@pytest.mark.parametrize("name", list(OPS))
def test_the_claims_made_on_a_gpu(name: str) -> None:
    results = list(
        run_suite(
            [name],
            target="interpreter",
            setting=SMALL,
            subject=kernel_subject(),
            reference=reference(),
        )
    )
    bad = [r for r in results if r.status is Status.FAILED]
    assert not bad, "\n".join(f"{r.op} {r.property}: {r.detail}" for r in bad)
    unseen = {r.property for r in results if r.status is Status.NOT_SHOWN}
    assert unseen <= {"tp_ranks"}, unseen
