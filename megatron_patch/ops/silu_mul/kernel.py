"""SiLU-mul in one launch: the reference's exponential and its order, one rounding at the end."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from ..elementary_kernel import UNFUSED, exp
from ..formats import require

# 1024 columns over four warps: eight bf16 a thread, one 16-byte load of the gate and one of the up.
_COLUMNS: Final = 1024
_WARPS: Final = 4


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, width, row_stride, COLUMNS: tl.constexpr):
    """Program (row, block): out[row, c] = silu(gate_up[row, c]) * gate_up[row, width + c]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    source = gate_up_ptr + row * row_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    e = exp(-tl.abs(gate))
    sigmoid = tl.div_rn(tl.where(gate >= 0, 1.0, e), 1.0 + e)
    out = gate * sigmoid * up
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def launch_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `op.silu_mul`; gate_up bf16 or fp32, any leading shape. Raises `ValueError` on others."""
    require(
        gate_up.dtype in (torch.bfloat16, torch.float32),
        f"silu_mul kernel: gate_up is {gate_up.dtype}; it takes bfloat16 or float32",
    )
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    flat = gate_up.reshape(-1, 2 * width)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    if out.numel() == 0:
        return out
    silu_mul_kernel[(flat.shape[0], triton.cdiv(width, _COLUMNS))](
        flat, out, width, flat.stride(0), COLUMNS=_COLUMNS, num_warps=_WARPS, **UNFUSED
    )
    return out
