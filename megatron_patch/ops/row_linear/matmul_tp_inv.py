"""`torch.ops.tp_inv_ops.matmul_tp_inv`: contract v1's product under the name it was published by.

Upstream surface: SGLang's `sglang.srt.tp_invariant_ops` and TBIK (arXiv 2511.17826), which define
`tp_inv_ops::matmul_tp_inv(Tensor a, Tensor b, Tensor? bias=None) -> Tensor`. The same bits for
bf16: 128-wide tiles of K, runs left to right, then a tree over the runs.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ...schema.reduction import run_length
from ..formats import NAMESPACE, eager_on_gpu, require
from . import reference

_NAME: Final = "matmul_tp_inv"
_SCHEMA: Final = "(Tensor a, Tensor b, Tensor? bias=None) -> Tensor"
_TILE: Final = 128


def _check(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> int:
    """Tiles of K; `ValueError` on operands outside contract v1."""
    require(
        a.dim() >= 2 and b.dim() == 2 and a.shape[-1] == b.shape[0],
        f"{_NAME}: a {tuple(a.shape)} and b {tuple(b.shape)}; it takes [..., M, K] and [K, N] "
        "(a weight [N, K] as weight.t())",
    )
    require(
        a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float64),
        f"{_NAME}: a is {a.dtype} and b {b.dtype}; both must be bfloat16",
    )
    k_size = a.shape[-1]
    require(
        k_size >= _TILE and k_size % _TILE == 0,
        f"{_NAME}: K={k_size} is not a multiple of the {_TILE}-wide tile; use row_linear, which "
        "follows the rollout's partition there",
    )
    require(
        bias is None or (bias.shape == b.shape[1:] and bias.dtype == a.dtype),
        f"{_NAME}: bias is {None if bias is None else (tuple(bias.shape), bias.dtype)}; it must be "
        f"[{b.shape[1]}] {a.dtype}",
    )
    require(
        a.device == b.device and (bias is None or bias.device == a.device),
        f"{_NAME}: a is on {a.device}, b on {b.device}, bias on "
        f"{None if bias is None else bias.device}; move them to one device",
    )
    return k_size // _TILE


def _product(a: torch.Tensor, weight: torch.Tensor, tiles: int) -> torch.Tensor:
    run = run_length(tiles)
    if a.device.type == "cuda":
        from .kernel import launch_row_linear_partial

        return launch_row_linear_partial(a, weight, tiles, run, torch.bfloat16)
    return reference.partial(a, weight, tiles, run, a.dtype)


def _forward(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    tiles = _check(a, b, bias)
    out = _product(a.reshape(-1, a.shape[-1]), b.t(), tiles)
    if bias is not None:
        out += bias
    return out.view(*a.shape[:-1], b.shape[1])


def _fake(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    _check(a, b, bias)
    return a.new_empty((*a.shape[:-1], b.shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    a, b = ctx.saved_tensors
    flat = gradient.reshape(-1, b.shape[1])
    # As many as the caller passed: a bias left out has no place.
    wanted = ctx.needs_input_grad
    gradients: list[torch.Tensor | None] = [None] * len(wanted)
    if wanted[0]:
        gradients[0] = (flat @ b.t()).view(a.shape)
    if wanted[1]:
        gradients[1] = a.reshape(-1, a.shape[-1]).t() @ flat
    if len(wanted) > 2 and wanted[2]:
        gradients[2] = flat.sum(0)
    return tuple(gradients)


def _define(namespace: str) -> Any:
    op = torch.library.custom_op(
        f"{namespace}::{_NAME}",
        _forward,
        mutates_args=(),
        device_types=("cpu", "cuda"),
        schema=_SCHEMA,
    )
    op.register_fake(_fake)
    op.register_autograd(_backward, setup_context=_setup_context)
    return op


# Under this package's own name always: `matmul_tp_inv` below must never run another's text.
_own = _define(NAMESPACE)
# Under the published name unless another package of this process (the vendored twin, or an SGLang
# that brings its own) has it: then that one stays there.
if not hasattr(torch.ops.tp_inv_ops, _NAME):
    _define("tp_inv_ops")


def matmul_tp_inv(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`a @ b + bias` in contract v1's order, in bf16.

    a: [..., M, K] bf16, b: [K, N] bf16 (usually `weight.t()`), bias: [N] bf16 or None, added in
    bf16 to the rounded product: only the first rank passes one. Returns [..., M, N] bf16.
    Any strides: rows that are contiguous in k and start at 16-byte addresses take the Hopper
    entries, all others the general kernel, with the same bits; leading dimensions that are no view
    of one are copied. Differentiable: the gradients are plain products. fp64 on a CPU only, for
    gradient checks. Raises `ValueError` on other formats (the published op also takes fp16 and
    TF32) or where K is no multiple of 128.
    """
    learnt = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (a, b, bias)
    )
    if eager_on_gpu(a) and not learnt:
        return _forward(a, b, bias)
    out: torch.Tensor = _own(a, b, bias)
    return out
