"""One pass over the logits: read, differentiate, round."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from ..elementary_kernel import UNFUSED, exp
from ..formats import require
from ..launch import launch

# 16 fp32 a thread: four 16-byte loads in flight.
_COLUMNS: Final = 2048
_WARPS: Final = 4


@triton.jit
def logits_gradient_kernel(
    logits_ptr,
    temperature_ptr,
    targets_ptr,
    normaliser_ptr,
    gradient_ptr,
    out_ptr,
    columns,
    first_column,
    real_columns,
    row_stride,
    temperature_stride,
    COLUMNS: tl.constexpr,
):
    """Program (row, block of columns): see `op.logits_gradient`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    weight = tl.div_rn(tl.load(gradient_ptr + row), temperature)
    target = tl.load(targets_ptr + row) - first_column
    value = tl.load(logits_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if temperature != 1.0:
        value = tl.div_rn(value, temperature)
    out = -(exp(value - tl.load(normaliser_ptr + row)) * weight)
    out = tl.where(column == target, out + weight, out)
    out = tl.where(column < real_columns, out, 0.0)
    out_row = out_ptr + row * columns
    tl.store(out_row + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def launch_logits_gradient(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    targets: torch.Tensor,
    normaliser: torch.Tensor,
    gradient: torch.Tensor,
    first_column: int,
    real_columns: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See `op.logits_gradient`; logits fp32 or bf16, columns next to each other, the rest fp32.

    Raises `ValueError` on other dtypes or strides.
    """
    rows, columns = logits.shape
    numbers = (temperature, normaliser, gradient)
    require(
        logits.dtype in (torch.float32, torch.bfloat16)
        and logits.stride(1) == 1
        and all(x.dtype == torch.float32 for x in numbers),
        f"logits_gradient kernel: logits {logits.dtype} with strides {logits.stride()}, "
        f"temperature, normaliser and gradient {[x.dtype for x in numbers]}; it takes float32 or "
        "bfloat16 logits with contiguous rows, and float32",
    )
    out = logits.new_empty((rows, columns), dtype=out_dtype)
    if out.numel() == 0:
        return out
    launch(
        logits_gradient_kernel,
        (rows, triton.cdiv(columns, _COLUMNS)),
        (
            logits, temperature.reshape(-1).contiguous(), targets.contiguous(),
            normaliser.contiguous(), gradient.contiguous(), out,
            columns, first_column, real_columns, logits.stride(0), int(temperature.numel() > 1),
        ),
        {"COLUMNS": _COLUMNS, "num_warps": _WARPS, **UNFUSED},
    )  # fmt: skip
    return out
