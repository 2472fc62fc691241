"""The cases of `tests/gpu/test_autograd.py` on the CPU: near fp64 gradients, and able to fail."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _cases() -> ModuleType:
    path = Path(__file__).parents[1] / "gpu" / "autograd_cases.py"
    spec = importlib.util.spec_from_file_location("autograd_cases", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["autograd_cases"] = module
    spec.loader.exec_module(module)
    return module


cases = _cases()


@pytest.mark.parametrize("name", list(cases.CASES))
def test_the_op_in_its_own_formats_is_near_its_fp64_gradient(name: str) -> None:
    found, wanted = cases.measured(name, "cpu"), cases.exact(name)
    for mine, right in zip(found, wanted, strict=True):
        assert mine.shape == right.shape
        assert cases.error(mine, right) < cases.BOUND
        # A gradient off by 2%, or of the row beside it, is seen.
        assert cases.error(mine * 1.02, right) > cases.BOUND
        assert cases.error(mine.roll(1, 0), right) > cases.BOUND
