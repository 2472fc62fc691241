"""RMSNorm, alone and with the residual addition in front of it."""

from __future__ import annotations

from typing import Any

import torch

from .. import ops
from ..function import apply
from ..ops.formats import accumulator_dtype, rounded_dtype
from .products import op_calls, parameter_gradient


def _gradients(
    stream: torch.Tensor, weight: torch.Tensor, eps: float, out_gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `round(stream * scale) * weight`: of the stream, and of the weight by row.

    Roundings pass gradients through; the weight's uses the rounded value that it multiplied.
    """
    wide = accumulator_dtype(stream.dtype)
    s, dy = stream.to(wide), out_gradient.to(wide)
    scale = torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
    normalised = s * scale
    dn = dy * weight.to(wide)
    ds = scale * (dn - normalised * (dn * normalised).mean(-1, keepdim=True))
    rounded = normalised.to(rounded_dtype(stream.dtype, "bfloat16")).to(wide)
    return ds, dy * rounded


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        op_calls["rms_norm"] += 1
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return ops.rms_norm(x, weight, eps)[0]

    @staticmethod
    def backward(ctx: Any, out_gradient: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        ds, by_row = _gradients(x, weight, ctx.eps, out_gradient)
        size = weight.shape[0]
        dweight = parameter_gradient(weight, lambda t: t.add_(by_row.reshape(-1, size).sum(0)))
        return ds.to(x.dtype), dweight, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        op_calls["rms_norm"] += 1
        out, stream = ops.rms_norm(x, weight, eps, residual=residual)
        ctx.save_for_backward(stream, weight)
        ctx.eps, ctx.x_dtype = eps, x.dtype
        return out, stream

    @staticmethod
    def backward(
        ctx: Any, out_gradient: torch.Tensor, stream_gradient: torch.Tensor
    ) -> tuple[Any, ...]:
        stream, weight = ctx.saved_tensors
        ds, by_row = _gradients(stream, weight, ctx.eps, out_gradient)
        ds = ds + stream_gradient
        size = weight.shape[0]
        dweight = parameter_gradient(weight, lambda t: t.add_(by_row.reshape(-1, size).sum(0)))
        return ds.to(ctx.x_dtype), ds, dweight, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`ops.rms_norm` of x [..., hidden] bf16 or fp32, with a gradient. Returns bf16."""
    return apply(_RMSNorm, x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.rms_norm` with its residual. x: [..., hidden] bf16; residual: like x, fp32.

    Returns (out bf16, stream fp32 = x + residual); both carry a gradient.
    """
    return apply(_AddRMSNorm, x, residual, weight, eps)
