"""The trainer's head on the GPU present: the memory it may take, bits that know no chunk, and a
product that is the first of its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("not run: no GPU", allow_module_level=True)

from megatron_patch import autograd, ops
from megatron_patch.autograd import HeadSettings
from megatron_patch.schema import vocabulary_segments

VOCABULARY = vocabulary_segments("qwen3_dense_true_on_policy_v2", 151936)
ROWS, HIDDEN = 1500, 1024


def _step(memory: int) -> tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor]:
    """(peak bytes forward and backward, logprobs, gradients of input and table)."""
    torch.manual_seed(3)
    x = torch.randn(ROWS, HIDDEN, device="cuda").bfloat16().requires_grad_()
    table = torch.randn(VOCABULARY.padded_size, HIDDEN, device="cuda").mul_(0.05).bfloat16()
    weight = torch.nn.Parameter(table)
    weight.main_grad = torch.zeros(table.shape, device="cuda")
    targets = torch.randint(VOCABULARY.vocab_size, (ROWS,), device="cuda")
    temperature = torch.tensor(0.7, device="cuda")
    settings = HeadSettings(
        vocabulary=VOCABULARY, order="segments", out_dtype="float32", memory_bytes=memory
    )
    peaks = []

    def measured(call: Callable[[], Any]) -> Any:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        return result

    # Once before, so that workspaces of libraries are there.
    autograd.head_logprobs(x, weight, targets, temperature, settings)[0].sum().backward()
    x.grad = None
    weight.main_grad.zero_()
    out = measured(lambda: autograd.head_logprobs(x, weight, targets, temperature, settings)[0])
    loss = (out * torch.linspace(-1, 2, ROWS, device="cuda")).sum()
    measured(loss.backward)
    assert x.grad is not None
    return peaks, out.detach(), x.grad, weight.main_grad


def test_extra_memory_is_the_chunk_s_and_no_bit_of_a_logprob_knows_it() -> None:
    everything = 4 * ROWS * VOCABULARY.padded_size
    _, whole, dx, dweight = _step(4 << 30)
    for memory in (64 << 20, 256 << 20):
        peaks, out, dx_parts, dweight_parts = _step(memory)
        # What a row keeps (24 numbers, and copies on the way), and its gradient in bf16.
        assert max(peaks) < memory + ROWS * (512 + 2 * HIDDEN) < everything, (memory, peaks)
        assert torch.equal(out.view(torch.int32), whole.view(torch.int32))
        again = _step(memory)
        assert torch.equal(dx_parts, again[2]) and torch.equal(dweight_parts, again[3])
        # cuBLAS associates by the number of rows.
        torch.testing.assert_close(dweight_parts, dweight, rtol=1e-4, atol=1e-4)
        error = (dx_parts.float() - dx.float()).norm() / dx.float().norm()
        assert error < 2e-3


def test_a_thread_may_begin_with_a_product() -> None:
    """As backward does: the copy engine's descriptors need a context that the thread has not."""
    x = torch.randn(512, HIDDEN, device="cuda").bfloat16()
    weight = torch.randn(2048, HIDDEN, device="cuda").bfloat16()
    expected = ops.linear(x, weight)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(ops.linear(x, weight)))
    thread.start()
    thread.join()
    assert found and torch.equal(found[0].view(torch.int16), expected.view(torch.int16))
