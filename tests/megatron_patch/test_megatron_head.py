"""The head in chunks: the bits of the unfused definition whatever a chunk may hold, in that
memory, forward and backward; and the entropy beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from head_memory import LargestSet
from megatron_models import V1, V2

from megatron_patch import autograd, ops
from megatron_patch.autograd import HeadSettings
from megatron_patch.autograd.chunks import Chunk, chunk
from megatron_patch.schema import padded_vocabulary, vocabulary_segments

HIDDEN, VOCABULARY = 24, 500
TEMPERATURE = torch.tensor(0.7)


def test_a_chunk_holds_what_fits_rows_before_blocks_and_at_least_one_row() -> None:
    width, memory = 19008, 256 << 20
    forward = {"row_bytes": 0, "block_bytes": 4 * width, "memory_bytes": memory}
    # Of the 3530 rows of a segment that fit, whole tiles; of 440 rows, all eight segments.
    assert chunk(8192, 8, **forward) == Chunk(3456, 1)
    assert chunk(440, 8, **forward) == Chunk(440, 8)
    assert chunk(882, 8, **forward) == Chunk(882, 4)
    assert chunk(883, 8, **forward) == Chunk(883, 2)
    backward = {"row_bytes": 24 * 2560, "block_bytes": 6 * width, "memory_bytes": memory}
    assert chunk(8192, 8, **backward) == Chunk(1408, 1)
    assert chunk(100, 8, row_bytes=0, block_bytes=64, memory_bytes=1) == Chunk(1, 1)
    assert chunk(100, 8, row_bytes=0, block_bytes=64, memory_bytes=640) == Chunk(10, 1)
    assert chunk(0, 4, row_bytes=8, block_bytes=64, memory_bytes=640) == Chunk(1, 4)


def _settings(contract: str, memory: int, **changed: Any) -> HeadSettings:
    settings: dict[str, Any] = {
        "vocabulary": vocabulary_segments(contract, VOCABULARY),
        "order": "segments" if contract == V2 else "gather",
        "out_dtype": "float32" if contract == V2 else "bfloat16",
        "memory_bytes": memory,
    }
    return HeadSettings(**settings | changed)


def _operands(rows: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    padded = padded_vocabulary(V2, VOCABULARY)
    x = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(padded, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(VOCABULARY, (rows,), generator=generator)
    targets[0], targets[-1] = 0, VOCABULARY - 1
    return [x, weight, targets]


def _unfused(contract: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logits of all rows, divided, normalised: [rows, vocabulary] fp32."""
    settings = _settings(contract, 1)
    logits = ops.linear(x, weight, out_dtype=settings.out_dtype)
    return ops.log_softmax(ops.temperature_logits(logits, TEMPERATURE), settings.vocabulary)


@pytest.mark.parametrize("contract", [V2, V1])
@pytest.mark.parametrize("memory", [1, 4 * 64 * 3, 1 << 14, 1 << 17, 1 << 28])
def test_the_bits_of_the_unfused_definition(contract: str, memory: int) -> None:
    x, weight, targets = _operands(13)
    logprobs = _unfused(contract, x, weight)
    out, none = autograd.head_logprobs(x, weight, targets, TEMPERATURE, _settings(contract, memory))
    assert none is None
    expected = logprobs.gather(1, targets[:, None]).squeeze(1)
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))
    plain = (ops.linear(x, weight, out_dtype="float32")[:, :VOCABULARY] / 0.7).log_softmax(-1)
    assert not torch.equal(plain.gather(1, targets[:, None]).squeeze(1), out), "another order shows"
    each = torch.full((13, 1), 0.7)
    rows = autograd.head_logprobs(x, weight, targets, each, _settings(contract, memory))[0]
    assert torch.equal(rows.view(torch.int32), expected.view(torch.int32)), "a temperature a row"


@pytest.mark.parametrize("contract", [V2, V1])
def test_the_entropy_is_that_of_the_distribution_whatever_the_chunk(contract: str) -> None:
    x, weight, targets = _operands(13)
    found = [
        autograd.head_logprobs(
            x, weight, targets, TEMPERATURE, _settings(contract, memory, entropy=True)
        )
        for memory in (1, 1 << 14, 1 << 28)
    ]
    p = _unfused(contract, x, weight).double().exp()
    exact = -(p * p.log()).sum(-1)
    for logprobs, entropy in found:
        assert entropy is not None and not entropy.requires_grad
        torch.testing.assert_close(entropy.double(), exact, rtol=0, atol=2e-6)
        assert torch.equal(entropy.view(torch.int32), found[0][1].view(torch.int32))
        assert torch.equal(logprobs.view(torch.int32), found[0][0].view(torch.int32))
    assert exact.min() > 0 and exact.std() > 0.1, "rows of different entropy"


def _gradients(
    contract: str, memory: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight, targets = _operands(13, dtype)
    x.requires_grad_()
    parameter = torch.nn.Parameter(weight)
    parameter.main_grad = torch.zeros(weight.shape)
    out, _ = autograd.head_logprobs(x, parameter, targets, TEMPERATURE, _settings(contract, memory))
    (out * torch.linspace(-1, 2, 13)).sum().backward()
    assert parameter.grad is None and x.grad is not None
    return x.grad, parameter.main_grad


@pytest.mark.parametrize("contract", [V2, V1])
def test_gradients_of_chunks_repeat_and_are_near_those_of_the_whole(contract: str) -> None:
    x, weight, targets = (t.double() if t.is_floating_point() else t for t in _operands(13))
    x.requires_grad_()
    weight.requires_grad_()
    exact = (x @ weight[:VOCABULARY].T / 0.7).log_softmax(-1).gather(1, targets[:, None])
    (exact.squeeze(1) * torch.linspace(-1, 2, 13)).sum().backward()
    whole = _gradients(contract, 1 << 28)
    for memory in (1, 1 << 14, 1 << 17):
        dx, dweight = _gradients(contract, memory)
        again = _gradients(contract, memory)
        assert torch.equal(dx, again[0]) and torch.equal(dweight, again[1])
        # The rounding of the logits' gradient to bf16, in v1 also that of the logits.
        for found, wanted in ((dx, x.grad), (dweight, weight.grad)):
            error = (found.double() - wanted).norm() / wanted.norm()
            assert error < (4e-3 if contract == V2 else 2e-2), error
        # Only the association of fp32 sums, and the rounding of dx after it, know the chunk.
        torch.testing.assert_close(dweight, whole[1], rtol=1e-5, atol=1e-6)
        assert (dx.float() - whole[0].float()).norm() < 1e-3 * whole[0].float().norm()
        assert dweight[VOCABULARY:].abs().max() == 0, "padding rows of the table learn nothing"


def test_a_frozen_table_and_a_frozen_input() -> None:
    x, weight, targets = _operands(5)
    full = _settings(V2, 1 << 14)
    for trained in (0, 1):
        operands = [x.clone(), weight.clone()]
        operands[trained].requires_grad_()
        autograd.head_logprobs(*operands, targets, TEMPERATURE, full)[0].sum().backward()
        assert operands[1 - trained].grad is None
        gradient = operands[trained].grad
        assert gradient is not None and gradient.abs().max() > 0


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("contract", [V2, V1])
def test_extra_memory_is_bounded_by_the_chunk(contract: str, entropy: bool) -> None:
    """Every tensor that the head makes, counted while it lives; the fp32 copies of bf16 operands
    that only a CPU makes, and what a row keeps, are no part of the chunk."""
    rows = 400
    x, weight, targets = _operands(rows)
    x.requires_grad_()
    parameter = torch.nn.Parameter(weight)
    parameter.main_grad = torch.zeros(weight.shape)
    peaks: dict[int, list[int]] = {}
    for memory in (1 << 16, 1 << 18, 1 << 28):
        settings = _settings(contract, memory, entropy=entropy)
        x.grad = None
        with LargestSet() as forward:
            out, _ = autograd.head_logprobs(x, parameter, targets, TEMPERATURE, settings)
        with LargestSet() as backward:
            out.sum().backward()
        peaks[memory] = [forward.peak, backward.peak]
    everything = rows * weight.shape[0] * (4 if contract == V2 else 2)
    # 24 or 32 numbers a row are kept, exchanged and combined. A CPU's products copy the gradient of
    # a block, and its weight, to fp32.
    for memory in (1 << 16, 1 << 18):
        forward, backward = peaks[memory]
        assert forward < memory + 512 * rows, (memory, peaks)
        assert backward < memory + memory * 2 // 3 + 512 * rows, (memory, peaks)
    small, _, large = peaks.values()
    assert all(few < many / 4 for few, many in zip(small, large, strict=True)), peaks
    assert all(peak > everything for peak in large), "the count sees the logits"


def _head_in_fp64(contract: str, memory: int) -> Callable[..., Any]:
    targets = _operands(3)[2]
    temperature = torch.tensor(0.7, dtype=torch.float64)

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        settings = _settings(contract, memory)
        return autograd.head_logprobs(x, weight, targets, temperature, settings)[0]

    return call


@pytest.mark.parametrize(("contract", "memory"), [(V2, 1 << 28), (V2, 1 << 11), (V1, 1 << 12)])
def test_gradcheck_in_fp64(contract: str, memory: int) -> None:
    x, weight, _ = _operands(3, torch.float64)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    assert torch.autograd.gradcheck(
        _head_in_fp64(contract, memory), leaves, eps=1e-6, atol=1e-7, rtol=1e-5, fast_mode=True
    )


# Of the small model: 512 padded columns, 64 hidden.
LAYOUTS = [(V2, (1, 1, 1)), (V2, (2, 1, 1)), (V1, (2, 1, 1)), (V2, (1, 1, 2))]


@pytest.mark.parametrize(("contract", "layout"), LAYOUTS)
def test_bits_and_gradients_do_not_depend_on_the_chunk(
    ranks: Any, model_folder: Any, contract: str, layout: tuple[int, int, int]
) -> None:
    world = layout[0] * layout[1] * layout[2]

    def run(memory: int) -> list[dict[str, Any]]:
        options = {"contract": contract, "logits_memory_bytes": memory, "entropy": True}
        options["segments"] = 4 if contract == V2 else 1
        return ranks.run(
            world,
            "head_tasks:in_chunks",
            str(model_folder("small")),
            "small",
            layout,
            options,
        )

    whole, parts = run(1 << 30), run(1 << 13)
    for one, many in zip(whole, parts, strict=True):
        # Products of the head: all rows and columns at once, or few.
        assert len(many["products"]) > 4 * len(one["products"]) > 0, "the chunks are real"
        assert max(r * c for r, c in many["products"]) < max(r * c for r, c in one["products"]) / 2
        scores, again = np.concatenate(one["scores"]), np.concatenate(many["scores"])
        assert np.array_equal(scores.view(np.int32), again.view(np.int32))
        assert many["train"]["loss"] == one["train"]["loss"]
        assert many["train"]["entropy"] == one["train"]["entropy"] > 0
        # BLAS associates by the number of rows, so a gradient of a hidden state may round to the
        # other bf16 neighbour, and the table's is added chunk by chunk.
        assert abs(many["train"]["grad_norm"] / one["train"]["grad_norm"] - 1) < 1e-4
    assert run(1 << 13)[0]["train"] == parts[0]["train"], "and the same every time"
