"""The second stage of a weight's gradient: programs' sums added in one fixed order."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from ...ops.launch import launch

# 128 bytes of a row; sixteen loads a thread in flight.
_ROWS: Final = 128
_COLUMNS: Final = 32
_WARPS: Final = 8


@triton.jit(do_not_specialize=["rows"])
def add_column_sums_kernel(
    parts_ptr, target_ptr, rows, columns, row_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """target[c] += sum over r of parts[r, c]: strided sums first, then one over them."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    within = column < columns
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & within[None, :]
        total += tl.load(parts_ptr + row * row_stride + column[None, :], mask=inside, other=0.0)
    old = tl.load(target_ptr + column, mask=within, other=0.0)
    tl.store(target_ptr + column, old + tl.sum(total, axis=0), mask=within)


def add_column_sums(parts: torch.Tensor, target: torch.Tensor) -> None:
    """Add parts [programs, columns] fp32 over programs into target [columns] fp32, in place."""
    assert parts.dtype == target.dtype == torch.float32 and target.is_contiguous()
    assert parts.shape[1:] == target.shape and parts.stride(1) == 1
    columns = target.shape[0]
    launch(
        add_column_sums_kernel,
        (triton.cdiv(columns, _COLUMNS),),
        (
            parts,
            target,
            parts.shape[0],
            columns,
            parts.stride(0),
        ),
        {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": _WARPS},
    )


@triton.jit
def add_pairs(a, b, c, d):
    """The combination of two sums that are taken together."""
    return a + c, b + d
