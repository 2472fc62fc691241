"""`linear`: checks, dispatch and shape inference."""

from __future__ import annotations

import torch

from ..formats import DTYPES, NAMESPACE, eager_on_gpu, require, rounded_dtype
from . import reference


@torch.library.custom_op(f"{NAMESPACE}::linear", mutates_args=(), device_types="cpu")
def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: str
) -> torch.Tensor:
    return reference.linear(x, weight, bias, DTYPES[out_dtype])


@_linear.register_kernel("cuda")
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: str
) -> torch.Tensor:
    from .kernel import launch_linear

    return launch_linear(x, weight, bias, DTYPES[out_dtype])


@_linear.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: str
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=DTYPES[out_dtype])


def check_operands(name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    """`ValueError` unless x [..., K] and weight [N, K] can be multiplied under a contract."""
    require(
        weight.dim() == 2 and x.shape[-1] == weight.shape[1],
        f"{name}: x {tuple(x.shape)} and weight {tuple(weight.shape)} do not share K",
    )
    require(
        x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float64),
        f"{name}: x is {x.dtype} and weight {weight.dtype}; both must be bfloat16",
    )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: str = "bfloat16",
) -> torch.Tensor:
    """`x @ weight.T + bias` where no rank cuts K: one fp32 accumulator, bias in fp32, one rounding.

    x: [..., K] bf16; weight: [N, K] bf16; bias: [N] or None. Returns [..., N] in `out_dtype`
    ("bfloat16", or "float32" for logits: the accumulator itself). A row's bits do not depend on
    the other rows. Raises `ValueError` on shapes or dtypes outside the contract.
    """
    check_operands("linear", x, weight)
    name = "float64" if x.dtype == torch.float64 else out_dtype
    require(name in DTYPES, f"linear: out_dtype={out_dtype!r}; choose bfloat16 or float32")
    assert rounded_dtype(x.dtype, name) == DTYPES[name]
    flat = x.reshape(-1, x.shape[-1])
    if eager_on_gpu(flat):
        from .kernel import launch_linear

        out = launch_linear(flat, weight, bias, DTYPES[name])
    else:
        out = _linear(flat, weight, bias, name)
    return out.view(*x.shape[:-1], weight.shape[0])
