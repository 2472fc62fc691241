"""The device functions of `elementary_kernel` in kernels of their own, so that they can be seen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_patch.ops import elementary_kernel

_BLOCK = 4096


@triton.jit
def exp_log_kernel(x_ptr, out_ptr, n, LOG: tl.constexpr, BLOCK: tl.constexpr):
    """exp(x), or log(x), of n numbers."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offset, mask=offset < n, other=1.0)
    if LOG:
        tl.store(out_ptr + offset, elementary_kernel.log(x), mask=offset < n)
    else:
        tl.store(out_ptr + offset, elementary_kernel.exp(x), mask=offset < n)


@triton.jit
def pair_sum_kernel(
    x_ptr, out_ptr, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LEVELS: tl.constexpr
):
    """Pair sums of ROWS contiguous rows of `length` numbers."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    x = tl.load(
        x_ptr + row[:, None] * length + column[None, :], mask=(column < length)[None, :], other=0.0
    )
    tl.store(out_ptr + row, elementary_kernel.pair_sum(x, ROWS, COLUMNS, LEVELS))


def _elementwise(x: torch.Tensor, is_log: bool) -> torch.Tensor:
    out = torch.empty_like(x)
    exp_log_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
        x.contiguous(), out, x.numel(), LOG=is_log, BLOCK=_BLOCK, **elementary_kernel.UNFUSED
    )
    return out


def exp(x: torch.Tensor) -> torch.Tensor:
    """`elementary_kernel.exp`, fp32."""
    return _elementwise(x, False)


def log(x: torch.Tensor) -> torch.Tensor:
    """`elementary_kernel.log`, fp32."""
    return _elementwise(x, True)


def pair_sum(x: torch.Tensor) -> torch.Tensor:
    """`elementary_kernel.pair_sum` of [rows, length] fp32."""
    rows, length = x.shape
    out = x.new_empty(rows)
    columns = triton.next_power_of_2(length)
    pair_sum_kernel[(rows,)](
        x.contiguous(), out, length, ROWS=1, COLUMNS=columns, LEVELS=columns.bit_length() - 1,
        **elementary_kernel.UNFUSED,
    )  # fmt: skip
    return out
