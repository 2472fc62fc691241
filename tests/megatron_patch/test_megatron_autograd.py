"""Each differentiable op: fp64 gradcheck against its own forward, repeatability, clean inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron_models import V1, V2

from megatron_patch import autograd, ops
from megatron_patch.autograd import HeadLayout
from megatron_patch.autograd.products import block_count, op_calls, parameter_gradient, tree
from megatron_patch.schema import row_reduction

F64 = torch.float64


def draw(*size: int, dtype: torch.dtype = F64, seed: int = 0, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=generator, dtype=F64) + shift).to(dtype)


def _linear(stride: int) -> Callable[..., Any]:
    return lambda x, w, b: autograd.linear(x, w, b, stride=stride, out_dtype="float32")


def _row_linear(contract: str, rollout_tp: int) -> Callable[..., Any]:
    reduction = row_reduction(contract, 24, rollout_tp=rollout_tp, segments=4)
    return lambda x, w, b: autograd.row_linear(x, w, b, reduction=reduction)


def _rope(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    table = ops.rope_table(4, 16, 100.0).double()
    return autograd.rope(q, k, torch.tensor([0, 3, 9]), table)


LAYOUT = HeadLayout(groups=2, per_group=2, dim=4, first=0, owned=2)
SHARED = HeadLayout(groups=1, per_group=4, dim=4, first=1, owned=2)


def _qk_norm_rope(layout: HeadLayout) -> Callable[..., Any]:
    table, positions = ops.rope_table(4, 16, 100.0), torch.tensor([0, 3, 9])

    def call(mixed: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = table.double() if mixed.dtype == F64 else table
        return autograd.qk_norm_rope(mixed, q, k, 1e-5, positions, wide, layout)

    return call


CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "linear": (_linear(1), [draw(3, 5), draw(16, 5, seed=1), draw(16, seed=2)]),
    "linear-fused": (_linear(2), [draw(3, 5), draw(16, 5, seed=1), draw(16, seed=2)]),
    "linear-odd": (_linear(1), [draw(2, 3), draw(7, 3, seed=1), draw(7, seed=2)]),
    "row_linear-v2": (_row_linear(V2, 1), [draw(3, 24), draw(5, 24, seed=1), draw(5, seed=2)]),
    "row_linear-v1": (_row_linear(V1, 4), [draw(3, 24), draw(5, 24, seed=1), draw(5, seed=2)]),
    "rms_norm": (
        lambda x, w: autograd.rms_norm(x, w, 1e-5),
        [draw(4, 2, 6), draw(6, seed=1, shift=1.5)],
    ),
    # Both outputs are differentiated, so the residual stream brings a gradient of its own.
    "add_rms_norm": (
        lambda x, r, w: autograd.add_rms_norm(x, r, w, 1e-5),
        [draw(4, 6), draw(4, 6, seed=1), draw(6, seed=2, shift=1.5)],
    ),
    "stream_rms_norm": (
        lambda x, w: autograd.stream_rms_norm(x, w, 1e-5),
        [draw(4, 6), draw(6, seed=1, shift=1.5)],
    ),
    "qk_norm_rope": (
        _qk_norm_rope(LAYOUT),
        [draw(3, 32), draw(4, seed=1, shift=1.5), draw(4, seed=2, shift=1.5)],
    ),
    "qk_norm_rope-shared": (
        _qk_norm_rope(SHARED),
        [draw(3, 24), draw(4, seed=1, shift=1.5), draw(4, seed=2, shift=1.5)],
    ),
    "rope": (_rope, [draw(3, 2, 4), draw(3, 1, 4, seed=1)]),
    "silu_mul": (autograd.silu_mul, [draw(3, 8)]),
    "attention": (
        lambda q, k, v: autograd.attention(q, k, v, lengths=[1, 4, 2], scale=0.4),
        [draw(7, 4, 3), draw(7, 2, 3, seed=1), draw(7, 2, 3, seed=2)],
    ),
    "embedding": (
        lambda w: autograd.embedding(torch.tensor([3, 0, 3, 1]), w),
        [draw(5, 4)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradcheck_in_fp64(name: str) -> None:
    function, inputs = CASES[name]
    leaves = [x.clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(function, leaves, eps=1e-6, atol=1e-7, rtol=1e-5)


def test_gradcheck_notices_a_wrong_gradient() -> None:
    """The inverse: a norm whose weight is applied twice in backward must not pass."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return ops.rms_norm(x, w, 1e-5)[0]

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
            from megatron_patch.autograd.rms_norm import gradients

            x, w = ctx.saved_tensors
            return gradients(x, w, 1e-5, g * w)[0], None

    x = draw(3, 4).requires_grad_()
    w = draw(4, seed=1, shift=1.5)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(lambda x: Wrong.apply(x, w), [x])


def _bf16(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.bfloat16().requires_grad_() for x in inputs]


@pytest.mark.parametrize("name", [n for n in CASES if n != "rope"])
def test_bf16_repeats_its_bits_and_leaves_its_inputs(name: str) -> None:
    function, inputs = CASES[name]
    if name == "add_rms_norm":
        # The residual is fp32.
        x, residual, weight = inputs
        make = lambda: [  # noqa: E731
            x.bfloat16().requires_grad_(),
            residual.float().requires_grad_(),
            weight.bfloat16().requires_grad_(),
        ]
    else:
        make = lambda: _bf16(inputs)  # noqa: E731
    runs = []
    for _ in range(2):
        leaves = make()
        before = [x.detach().clone() for x in leaves]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum((o.float() * (i + 1)).sum() for i, o in enumerate(outputs)).backward()
        assert all(torch.equal(a, b) for a, b in zip(before, leaves, strict=True))
        runs.append([*outputs, *(x.grad for x in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert all(g is not None and g.abs().max() > 0 for g in runs[0][-len(inputs) :])


def test_forward_is_the_vendored_op_bit_for_bit() -> None:
    x, w = draw(5, 256).bfloat16(), draw(16, 256, seed=1).bfloat16()
    reduction = row_reduction(V2, 256, segments=4)
    before = op_calls["row_linear:segments"]
    ours = autograd.row_linear(x, w, reduction=reduction)
    assert op_calls["row_linear:segments"] == before + 1
    assert torch.equal(
        ours.view(torch.int16), ops.row_linear(x, w, reduction=reduction).view(torch.int16)
    )


def test_parameter_gradients_reach_main_grad_without_bf16() -> None:
    """Three micro-batches of 1/3 each: in bf16 the sum would not be the fp32 one."""
    weight = torch.nn.Parameter(draw(4, 8, seed=1).bfloat16())
    weight.main_grad = torch.zeros(4, 8)
    x = draw(6, 8).bfloat16()
    for _ in range(3):
        autograd.linear(x, weight).float().sum().div(3).backward()
    assert weight.grad is None
    assert weight.grad_added_to_main_grad
    dy = torch.full((6, 4), 1 / 3).bfloat16().float()
    wanted = dy.t() @ x.float()
    torch.testing.assert_close(weight.main_grad, 3 * wanted, rtol=1e-6, atol=1e-6)
    assert not torch.equal(weight.main_grad, weight.main_grad.bfloat16().float())


def test_a_frozen_weight_gets_no_gradient() -> None:
    weight = draw(4, 8, seed=1)
    x = draw(6, 8).requires_grad_()
    autograd.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(6, 8))
    assert weight.grad is None


@pytest.mark.parametrize(
    ("size", "ranks", "count"),
    [
        (1024, 1, 8),
        (1024, 4, 8),
        (1024, 8, 8),
        (12, 1, 4),
        (12, 2, 4),
        (7, 1, 1),
        (7, 7, 7),
        (6, 3, 3),
    ],
)
def test_blocks_are_the_same_for_every_degree_that_divides(size, ranks, count) -> None:  # noqa: ANN001
    assert block_count(size, ranks) == count
    assert count % ranks == 0


def test_tree_adds_as_written() -> None:
    leaves = [torch.tensor(x) for x in (1e8, 1.0, -1e8, 1.0)]
    balanced = tree(4, lambda i: leaves[i])
    assert balanced == (leaves[0] + leaves[1]) + (leaves[2] + leaves[3])
    assert balanced != ((leaves[0] + leaves[1]) + leaves[2]) + leaves[3]


def test_parameter_gradient_without_main_grad_is_returned() -> None:
    weight = torch.nn.Parameter(torch.ones(3).bfloat16())
    gradient = parameter_gradient(weight, lambda t: t.add_(1 / 3))
    assert gradient is not None
    assert gradient.dtype == torch.bfloat16


def test_flash_backward_is_asked_for_its_deterministic_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch's operator reads the mode; with warn_only it warns and adds dq with atomics."""
    from megatron_patch.autograd.attention import flash_backward

    seen: list[tuple[bool, bool]] = []

    def operator(gradient: torch.Tensor, *inputs: Any, **_: Any) -> Any:
        mode = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        seen.append(mode)
        if len(seen) == 4:
            raise RuntimeError("out of memory")
        return inputs[:3]

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", operator)
    tensors = tuple(draw(3, 2, 4, dtype=torch.bfloat16, seed=n) for n in range(6))
    rest = (torch.tensor([0, 1, 3], dtype=torch.int32), 2, 0.5)
    before = torch.get_deterministic_debug_mode()
    try:
        for mode in ("default", "warn", "error", "warn"):
            torch.set_deterministic_debug_mode(mode)
            entered = torch.get_deterministic_debug_mode()
            if len(seen) < 3:
                assert flash_backward(*tensors, *rest) == tensors[1:4]
            else:
                with pytest.raises(RuntimeError, match="out of memory"):
                    flash_backward(*tensors, *rest)
            assert torch.get_deterministic_debug_mode() == entered
    finally:
        torch.set_deterministic_debug_mode(before)
    assert seen == [(True, False)] * 4
