"""RMSNorm, alone and with the residual addition in front of it."""

from __future__ import annotations

from typing import Any

import torch

from .. import ops
from ..function import apply
from ..ops.formats import accumulator_dtype, rounded_dtype
from .products import op_calls, parameter_gradient


def gradients(
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


def _backward(
    ctx: Any, out_gradient: torch.Tensor, stream_gradient: torch.Tensor | None, *, residual: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x, the residual (where there is one) and the weight."""
    stream, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad[-2]
    if stream.is_cuda:
        from .kernels.columns import add_column_sums
        from .kernels.rms_norm import launch_rms_norm_backward

        dx, dresidual, parts = launch_rms_norm_backward(
            stream, weight, ctx.eps, out_gradient, stream_gradient, ctx.x_dtype,
            residual=residual, weight_gradient=wanted,
        )  # fmt: skip
        add = lambda target: add_column_sums(parts, target)  # noqa: E731
    else:
        ds, by_row = gradients(stream, weight, ctx.eps, out_gradient)
        if stream_gradient is not None:
            ds = ds + stream_gradient
        dx, dresidual = ds.to(ctx.x_dtype), ds if residual else None
        add = lambda target: target.add_(by_row.reshape(-1, weight.shape[0]).sum(0))  # noqa: E731
    return dx, dresidual, parameter_gradient(weight, add) if wanted else None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        op_calls["rms_norm"] += 1
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.x_dtype = eps, x.dtype
        return ops.rms_norm(x, weight, eps)[0]

    @staticmethod
    def backward(ctx: Any, out_gradient: torch.Tensor) -> tuple[Any, ...]:
        dx, _, dweight = _backward(ctx, out_gradient, None, residual=False)
        return dx, dweight, None


class _StreamRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stream: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        op_calls["rms_norm"] += 1
        ctx.save_for_backward(stream, weight)
        ctx.eps, ctx.x_dtype = eps, stream.dtype
        return ops.rms_norm(stream, weight, eps)[0], stream.view_as(stream)

    @staticmethod
    def backward(
        ctx: Any, out_gradient: torch.Tensor, stream_gradient: torch.Tensor
    ) -> tuple[Any, ...]:
        dx, _, dweight = _backward(ctx, out_gradient, stream_gradient, residual=False)
        return dx, dweight, None


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
        dx, dresidual, dweight = _backward(ctx, out_gradient, stream_gradient, residual=True)
        return dx, dresidual, dweight, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`ops.rms_norm` of x [..., hidden] bf16 or fp32, with a gradient. Returns bf16."""
    return apply(_RMSNorm, x, weight, eps)


def stream_rms_norm(
    stream: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`ops.rms_norm` of stream [..., hidden] fp32, the stream itself), both with a gradient: what
    the stream brings back from later layers is added where the norm's own gradient is made, in the
    same launch."""
    return apply(_StreamRMSNorm, stream, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.rms_norm` with its residual. x: [..., hidden] bf16; residual: like x, fp32.

    Returns (out bf16, stream fp32 = x + residual); both carry a gradient.
    """
    return apply(_AddRMSNorm, x, residual, weight, eps)
