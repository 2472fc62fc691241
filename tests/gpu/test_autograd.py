"""Gradients on the GPU: right, the same bits again, and the same under recomputation."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("not run: no GPU", allow_module_level=True)

from autograd_cases import BOUND, CASES, error, exact, measured

from miles_launcher.conformance.bits import differing


@pytest.mark.parametrize("name", list(CASES))
def test_gradients_are_right_and_repeat_their_bits(name: str) -> None:
    found, wanted = measured(name, "cuda"), exact(name)
    assert all(x.is_cuda for x in found)
    for mine, right in zip(found, wanted, strict=True):
        assert error(mine, right) < BOUND
    for recompute in (False, True, False, True):
        again = measured(name, "cuda", recompute)
        assert not any(differing(a, b) for a, b in zip(again, found, strict=True))


@pytest.mark.parametrize("columns", [192, 1024])
def test_a_weights_gradient_is_added_where_megatron_keeps_it(columns: int) -> None:
    """Twice into `main_grad`, in place, as two micro-batches do."""
    from megatron_patch import autograd

    x = torch.randn(130, 256, device="cuda").bfloat16()
    weight = torch.nn.Parameter(torch.randn(columns, 256, device="cuda").bfloat16())
    weight.main_grad = torch.zeros(columns, 256, device="cuda")
    held, gradient = weight.main_grad.data_ptr(), torch.randn(130, columns, device="cuda")
    for _ in range(2):
        autograd.linear(x, weight).backward(gradient.bfloat16())
    wanted = 2 * gradient.bfloat16().double().t() @ x.double()
    assert weight.main_grad.data_ptr() == held and weight.grad is None
    assert (weight.main_grad.double() - wanted).norm() / wanted.norm() < 1e-5
