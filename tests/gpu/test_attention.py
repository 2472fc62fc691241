"""The attention on a GPU beyond the conformance suite: gradients, recomputation, captured steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("not run: no GPU", allow_module_level=True)

from torch.utils.checkpoint import checkpoint

from megatron_patch import autograd
from miles_launcher.conformance.bits import differing, random
from sglang_patch.ops.attention.kernel_triton import PagedKeys, launch_keys
from sglang_patch.ops.attention.op import gpu_path

LENGTHS = [65, 300, 513, 1100]
HEADS, KV_HEADS = 8, 2


@pytest.fixture(autouse=True)
def the_trainers_mode() -> Iterator[None]:
    """With warn_only PyTorch's flash backward alone would add dq with atomics."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def operands(head_dim: int) -> list[torch.Tensor]:
    tokens = sum(LENGTHS)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [random(tokens, n, head_dim, seed=70 + i).cuda() for i, n in enumerate(heads)]


def gradients(head_dim: int, path: str, recompute: bool) -> list[torch.Tensor]:
    *inputs, gradient = operands(head_dim)
    leaves = [x.requires_grad_() for x in inputs]
    scale = head_dim**-0.5

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return autograd.attention(q, k, v, lengths=LENGTHS, scale=scale, path=path)

    out = checkpoint(run, *leaves, use_reentrant=False) if recompute else run(*leaves)
    return list(torch.autograd.grad(out, leaves, gradient))


def exact(head_dim: int) -> list[torch.Tensor]:
    """The formula in fp64 through PyTorch's autograd."""
    *inputs, gradient = operands(head_dim)
    leaves = [x.double().requires_grad_() for x in inputs]
    start, outs = 0, []
    for length in LENGTHS:
        q, k, v = (x[start : start + length] for x in leaves)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * head_dim**-0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        start += length
    return list(torch.autograd.grad(torch.cat(outs), leaves, gradient.double()))


def paths(head_dim: int) -> list[str]:
    """Those of this GPU, the one that may be missing last."""
    here = {"triton", gpu_path(torch.cuda.get_device_capability(), head_dim)}
    return sorted(here, reverse=True)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_are_right_and_repeat_their_bits(head_dim: int) -> None:
    wanted = exact(head_dim)
    for path in paths(head_dim):
        if path == "fa3":
            pytest.importorskip("sgl_kernel")
        found = gradients(head_dim, path, recompute=False)
        for mine, right in zip(found, wanted, strict=True):
            assert (mine.double() - right).norm() / right.norm() < 1e-2, path
        for recompute in (False, True, False, True):
            again = gradients(head_dim, path, recompute)
            assert [differing(a, b) for a, b in zip(again, found, strict=True)] == [0, 0, 0], path


def test_a_captured_step_reads_the_lengths_and_slots_of_its_replay() -> None:
    query, key, value, _ = operands(64)
    slots = torch.randperm(key.shape[0] + 99, device="cuda")[: key.shape[0]]
    keys, values = (x.new_full((x.shape[0] + 99, *x.shape[1:]), 3.0) for x in (key, value))
    keys[slots], values[slots] = key, value
    table = torch.zeros(9, 2048, dtype=torch.int32, device="cuda")
    rows, last, start = [5, 1, 8, 2], [], 0
    for row, length in zip(rows, LENGTHS, strict=True):
        table[row, :length] = slots[start : start + length].int()
        start += length
        last.append(start - 1)
    whole = autograd.attention(query, key, value, lengths=LENGTHS, scale=0.125, path="triton")
    step = query[last].clone()
    lengths, requests = torch.ones(4, device="cuda").long(), torch.zeros(4, device="cuda").long()
    out = torch.empty_like(step)

    def decode(programs: int) -> None:
        launch_keys(
            step,
            keys,
            values,
            PagedKeys(lengths, table, requests),
            scale=0.125,
            query_starts=None,
            longest_query=1,
            longest_key=2048,
            out=out,
            with_lse=False,
            programs=programs,
        )

    for programs in (1, 3):
        lengths.fill_(1)
        requests.zero_()
        decode(programs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode(programs)
        lengths.copy_(torch.tensor(LENGTHS))
        requests.copy_(torch.tensor(rows))
        out.fill_(float("nan"))
        graph.replay()
        assert differing(out, whole[last]) == 0
        lengths.sub_(1)
        graph.replay()
        assert differing(out, whole[last]) > 0, "the step must read its lengths"
