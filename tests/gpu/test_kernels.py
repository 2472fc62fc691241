"""Every kernel claim on the GPU present; on other machines the interpreter runs the same claims."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("not run: no GPU", allow_module_level=True)

from benchmarks.kernel_checks import CHECKS, FULL, missing_requirement


@pytest.mark.parametrize("name", list(CHECKS))
def test_kernel(name: str) -> None:
    reason = missing_requirement(name, FULL.device)
    if reason:
        pytest.skip(reason)
    assert CHECKS[name](FULL)
