"""Backward of SiLU-mul in one launch."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from ...ops.launch import launch

_ELEMENTS: Final = 1024
_WARPS: Final = 4


@triton.jit(do_not_specialize=["rows"])
def silu_mul_backward_kernel(
    gate_up_ptr, out_gradient_ptr, gradient_ptr, rows, width, row_stride, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, block of rows) of the forward pass."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = row < rows
    if not EVEN:
        inside = inside & (column < width)
    source = gate_up_ptr + row * row_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(out_gradient_ptr + row * out_stride + column, mask=inside, other=0.0)
    dy = dy.to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dup = dy * gate * sigmoid
    target = gradient_ptr + row * (2 * width) + column
    tl.store(target, dgate.to(gradient_ptr.dtype.element_ty), mask=inside)
    tl.store(target + width, dup.to(gradient_ptr.dtype.element_ty), mask=inside)


def launch_silu_mul_backward(gate_up: torch.Tensor, out_gradient: torch.Tensor) -> torch.Tensor:
    """Gradient of gate_up [..., 2 * width], bf16 or fp32, given that of the result [..., width]."""
    width = out_gradient.shape[-1]
    flat, outer = gate_up.reshape(-1, 2 * width), out_gradient.reshape(-1, width)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    outer = outer if outer.stride(1) == 1 else outer.contiguous()
    gradient = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    rows = flat.shape[0]
    if gradient.numel() == 0:
        return gradient
    columns = next((c for c in (1024, 512, 256) if width % c == 0), 1024)
    height = _ELEMENTS // columns
    launch(
        silu_mul_backward_kernel,
        (triton.cdiv(width, columns), triton.cdiv(rows, height)),
        (
            flat,
            outer,
            gradient,
            rows,
            width,
            flat.stride(0),
            outer.stride(0),
        ),
        {"ROWS": height, "COLUMNS": columns, "EVEN": width % columns == 0, "num_warps": _WARPS},
    )
    return gradient
