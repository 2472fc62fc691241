"""The backward kernels against the reference's gradients, in Triton's interpreter.

Not collected by name: `test_megatron_backward_kernels.py` runs this file with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_megatron_backward_kernels.py"

import bf16_interpreter

from megatron_patch import autograd, ops
from megatron_patch.autograd import HeadLayout
from megatron_patch.autograd.kernels import columns, qk_norm_rope, rms_norm, silu_mul

bf16_interpreter.install()
BF16, FP32, F64 = torch.bfloat16, torch.float32, torch.float64
EPS = 1e-5
# Of the norm of the gradient: bf16 results round by 2**-9; fp32 ones by the order of their sums.
NARROW, WIDE = 2.0**-8, 1e-6


@pytest.fixture(autouse=True)
def _a_small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs than rows, so that each adds up several."""
    for module, count in ((rms_norm, 1), (qk_norm_rope, 2)):
        monkeypatch.setattr(module, "processors", lambda device, count=count: count)


def draw(*size: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(dtype)


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def summed(parts: torch.Tensor) -> torch.Tensor:
    """On top of what is there already."""
    target = torch.ones(parts.shape[1])
    columns.add_column_sums(parts, target)
    return target - 1.0


def exact(
    function: Callable[..., Any], inputs: list[torch.Tensor], given: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients in fp64 by the written backward, which gradcheck has seen."""
    leaves = [x.double().requires_grad_() for x in inputs]
    out = function(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    return list(torch.autograd.grad(out, leaves, [g.double() for g in given]))


@pytest.mark.parametrize(
    ("hidden", "tile"),
    [(8, {}), (96, {}), (96, {"columns": 32}), (96, {"again": False}), (2560, {})],
)
def test_add_rms_norm(hidden: int, tile: dict[str, int]) -> None:
    x, residual = draw(11, hidden), draw(11, hidden, dtype=FP32, seed=1)
    weight, dy = 1.0 + draw(hidden, seed=2) / 4, draw(11, hidden, seed=3)
    carried = draw(11, hidden, dtype=FP32, seed=4)
    stream = x.float() + residual
    runs = [
        rms_norm.launch_rms_norm_backward(
            stream, weight, EPS, dy, carried, BF16, residual=True, **tile
        )
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    dx, dresidual, parts = runs[0]
    wanted = exact(
        lambda x, r, w: autograd.add_rms_norm(x, r, w, EPS), [x, residual, weight], [dy, carried]
    )
    assert 1 < parts.shape[0] < 11
    assert dresidual is not None and far(dresidual, wanted[1]) < WIDE
    assert far(dx, wanted[0]) < NARROW and torch.equal(dx, dresidual.to(BF16))
    # The weight's multiplies the rounded value, which fp64 does not round.
    assert far(summed(parts), wanted[2]) < NARROW
    applied_twice = rms_norm.launch_rms_norm_backward(
        stream, weight, EPS, (dy * weight).to(BF16), carried, BF16, residual=True
    )
    assert far(applied_twice[0], wanted[0]) > 4 * NARROW


def test_a_norm_without_residual_or_weight_gradient() -> None:
    stream, weight, dy = draw(5, 40, dtype=FP32), 1.0 + draw(40, seed=2) / 4, draw(5, 40, seed=3)
    dx, dresidual, _ = rms_norm.launch_rms_norm_backward(
        stream, weight, EPS, dy, None, FP32, residual=False, weight_gradient=False
    )
    wanted = exact(lambda x, w: autograd.rms_norm(x, w, EPS), [stream, weight], [dy])
    assert dresidual is None and dx.dtype == FP32 and far(dx, wanted[0]) < WIDE
    wide = torch.zeros(1, 40000)
    with pytest.raises(ValueError, match="hidden=40000"):
        rms_norm.launch_rms_norm_backward(wide, wide[0], EPS, wide, None, FP32, residual=False)


@pytest.mark.parametrize(
    "layout",
    [
        HeadLayout(groups=8, per_group=4, dim=16, first=0, owned=4),
        HeadLayout(groups=3, per_group=3, dim=32, first=0, owned=3),
        HeadLayout(groups=1, per_group=8, dim=16, first=2, owned=4),
    ],
)
def test_qk_norm_rope(layout: HeadLayout) -> None:
    tokens, dim = 11, layout.dim
    heads = layout.groups * layout.owned
    mixed = draw(tokens, layout.groups * (layout.per_group + 2) * dim)
    weights = [1.0 + draw(dim, seed=n) / 4 for n in (1, 2)]
    given = [draw(tokens, n, dim, seed=n) for n in (heads, layout.groups, layout.groups)]
    positions, table = torch.arange(tokens) * 97, ops.rope_table(dim, 1000, 1e4)
    runs = []
    for _ in range(2):
        gradient = torch.full_like(mixed, float("nan"))
        if layout.owned < layout.per_group:
            gradient.zero_()
        query, key, _ = layout.split(mixed)
        of_query, of_key = qk_norm_rope.launch_qk_norm_rope_backward(
            (query, key), (weights[0], weights[1]), EPS, positions, table,
            (given[0], given[1], given[2]), layout.split(gradient),
        )  # fmt: skip
        runs.append((gradient, of_query, of_key))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    wanted = exact(
        lambda m, q, k: autograd.qk_norm_rope(m, q, k, EPS, positions, table.double(), layout),
        [mixed, *weights],
        given,
    )
    gradient, of_query, of_key = runs[0]
    assert 1 < of_key.shape[0] < tokens
    assert far(gradient, wanted[0]) < NARROW
    assert far(summed(of_query), wanted[1]) < NARROW
    assert far(summed(of_key), wanted[2]) < NARROW
    # The inverse: rotated on instead of back.
    wrong = torch.zeros_like(mixed)
    table[:, dim // 2 :].neg_()
    qk_norm_rope.launch_qk_norm_rope_backward(
        (query, key), (weights[0], weights[1]), EPS, positions, table,
        (given[0], given[1], given[2]), layout.split(wrong),
    )  # fmt: skip
    assert far(wrong, wanted[0]) > 4 * NARROW


@pytest.mark.parametrize("width", [3, 100, 768])
def test_silu_mul(width: int) -> None:
    gate_up, dy = draw(5, 2 * width) * 3, draw(5, width, seed=1)
    runs = [silu_mul.launch_silu_mul_backward(gate_up, dy) for _ in range(2)]
    assert torch.equal(*runs)
    (wanted,) = exact(autograd.silu_mul, [gate_up], [dy])
    assert far(runs[0], wanted) < NARROW
    swapped = torch.cat(gate_up.chunk(2, dim=1)[::-1], dim=1)
    assert far(silu_mul.launch_silu_mul_backward(swapped, dy), wanted) > 4 * NARROW
