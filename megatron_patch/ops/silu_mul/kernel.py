"""SiLU-mul in one launch: the reference's exponential and its order, one rounding at the end."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from ..elementary_kernel import UNFUSED, sigmoid
from ..formats import require
from ..launch import launch

# Elements of a program. Eight or sixteen bf16 a thread are one or two 16-byte loads each of the
# gate and of the up projection: the first is quicker for few rows, the second for many.
_ELEMENTS: Final = 1024
_FEW_ROWS: Final = 256
_WARPS: Final = (4, 2)


@triton.jit(do_not_specialize=["rows"])
def silu_mul_kernel(
    gate_up_ptr, out_ptr, rows, width, row_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, block of rows): out[r, c] = silu(gate_up[r, c]) * gate_up[r,
    width + c]. EVEN: `width` is a multiple of COLUMNS."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = row < rows
    if not EVEN:
        inside = inside & (column < width)
    source = gate_up_ptr + row * row_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    out = gate * sigmoid(gate) * up
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
    rows = flat.shape[0]
    if out.numel() == 0:
        return out
    # A block that leaves no rest, so that no thread is idle.
    columns = next((c for c in (512, 256) if width % c == 0), _ELEMENTS)
    height = _ELEMENTS // columns
    launch(
        silu_mul_kernel,
        (triton.cdiv(width, columns), triton.cdiv(rows, height)),
        (
            flat,
            out,
            rows,
            width,
            flat.stride(0),
        ),
        {
            "ROWS": height,
            "COLUMNS": columns,
            "EVEN": width % columns == 0,
            "num_warps": _WARPS[rows > _FEW_ROWS],
            **UNFUSED,
        },
    )
    return out
