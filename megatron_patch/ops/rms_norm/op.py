"""`rms_norm`: checks, dispatch and shape inference."""

from __future__ import annotations

from typing import overload

import torch

from ..formats import NAMESPACE, accumulator_dtype, eager_on_gpu, require, rounded_dtype
from . import reference


@torch.library.custom_op(f"{NAMESPACE}::rms_norm", mutates_args=(), device_types="cpu")
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return reference.rms_norm(x, weight, None, eps)[0].contiguous()


@_rms_norm.register_kernel("cuda")
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from .kernel import launch_rms_norm

    return launch_rms_norm(x, weight, eps)


@_rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=rounded_dtype(x.dtype, "bfloat16"))


@torch.library.custom_op(f"{NAMESPACE}::add_rms_norm", mutates_args=(), device_types="cpu")
def _add_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, stream = reference.rms_norm(x, weight, residual, eps)
    return out.contiguous(), stream.contiguous()


@_add_rms_norm.register_kernel("cuda")
def _(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from .kernel import launch_add_rms_norm

    return launch_add_rms_norm(x, weight, residual, eps)


@_add_rms_norm.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        x.new_empty(x.shape, dtype=rounded_dtype(x.dtype, "bfloat16")),
        x.new_empty(x.shape, dtype=accumulator_dtype(x.dtype)),
    )


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: None = None
) -> tuple[torch.Tensor, None]: ...


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]: ...


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """RMSNorm over the last dimension of `x + residual`.

    x: [..., hidden], bf16 or fp32. weight: [hidden], used in fp32. residual: like x, fp32, or None.
    Returns (out [..., hidden] bf16, stream [..., hidden] fp32): `stream = x + residual` in fp32 is
    the residual of the next norm; without a residual there is nothing to add, and it is None. Mean
    of squares in fp32; the normalised value is rounded to bf16 before the fp32 weight multiplies
    it; the product is rounded to bf16. fp64 inputs stay fp64. Raises `ValueError` on a shape or
    dtype that the contract does not name.
    """
    require(
        x.shape[-1:] == weight.shape,
        f"rms_norm: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}",
    )
    require(
        x.dtype in (torch.bfloat16, torch.float32, torch.float64),
        f"rms_norm: x is {x.dtype}; the contract takes bfloat16 or float32",
    )
    if residual is None:
        if eager_on_gpu(x):
            from .kernel import launch_rms_norm

            return launch_rms_norm(x, weight, eps), None
        return _rms_norm(x, weight, eps), None
    require(
        residual.shape == x.shape and residual.dtype == accumulator_dtype(x.dtype),
        f"rms_norm: residual {residual.dtype} {tuple(residual.shape)} must be "
        f"{accumulator_dtype(x.dtype)} {tuple(x.shape)}: the residual stream is never rounded",
    )
    if eager_on_gpu(x):
        from .kernel import launch_add_rms_norm

        return launch_add_rms_norm(x, weight, residual, eps)
    return _add_rms_norm(x, weight, residual, eps)
