"""`rms_norm`: checks, dispatch and shape inference."""

from __future__ import annotations

import torch

from ..formats import NAMESPACE, accumulator_dtype, require, rounded_dtype
from . import reference


@torch.library.custom_op(f"{NAMESPACE}::rms_norm", mutates_args=(), device_types="cpu")
def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, stream = reference.rms_norm(x, weight, residual, eps)
    if stream is x:  # an op may not return its input
        stream = x.clone(memory_format=torch.contiguous_format)
    return out.contiguous(), stream.contiguous()


@_rms_norm.register_kernel("cuda")
def _(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from .kernel import launch_rms_norm

    return launch_rms_norm(x, weight, residual, eps)


@_rms_norm.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        x.new_empty(x.shape, dtype=rounded_dtype(x.dtype, "bfloat16")),
        x.new_empty(x.shape, dtype=accumulator_dtype(x.dtype)),
    )


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over the last dimension of `x + residual`.

    x: [..., hidden], bf16 or fp32. weight: [hidden], used in fp32. residual: like x, fp32, or None.
    Returns (out [..., hidden] bf16, stream [..., hidden] fp32): `stream = x + residual` in fp32 is
    the residual of the next norm. Mean of squares in fp32; the normalised value is rounded to bf16
    before the fp32 weight multiplies it; the product is rounded to bf16. fp64 inputs stay fp64.
    Raises `ValueError` on a shape or dtype that the contract does not name.
    """
    require(
        x.shape[-1:] == weight.shape,
        f"rms_norm: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}",
    )
    require(
        x.dtype in (torch.bfloat16, torch.float32, torch.float64),
        f"rms_norm: x is {x.dtype}; the contract takes bfloat16 or float32",
    )
    if residual is not None:
        require(
            residual.shape == x.shape and residual.dtype == accumulator_dtype(x.dtype),
            f"rms_norm: residual {residual.dtype} {tuple(residual.shape)} must be "
            f"{accumulator_dtype(x.dtype)} {tuple(x.shape)}: the residual stream is never rounded",
        )
    return _rms_norm(x, weight, residual, eps)
