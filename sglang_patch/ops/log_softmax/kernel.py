"""Statistics of vocabulary segments, and their combination, in the reference's pair tree.

A segment is read in blocks of a power of two; a block is summed as a pair tree and the blocks' sums
are added as a pair tree. That is the pair tree over the whole segment, so the bits do not depend on
the block, on the rows, or on which rank holds the segment, and equal the CPU's.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from ..elementary_kernel import UNFUSED, exp, log, pair_sum
from ..formats import require

# 4096 columns over eight warps: 16 fp32 a thread, four 16-byte loads in flight.
_COLUMNS: Final = 4096
_WARPS: Final = 8
# Rows of at most a few dozen numbers: one warp holds several.
_COMBINE_ROWS: Final = 16
_COMBINE_WARPS: Final = 1


@triton.jit
def segment_statistics_kernel(
    logits_ptr,
    largest_ptr,
    total_ptr,
    real_columns,
    width,
    row_stride,
    column_stride,
    COLUMNS: tl.constexpr,
    COLUMN_LEVELS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_LEVELS: tl.constexpr,
):
    """Program (row, segment): maximum, and sum of exp(logit - maximum), over its real columns."""
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    start = segment * width
    count = tl.maximum(tl.minimum(real_columns - start, width), 0)
    column = tl.arange(0, COLUMNS)
    source = logits_ptr + row * row_stride + start.to(tl.int64) * column_stride
    blocks = tl.cdiv(count, COLUMNS)
    block_largest = tl.full((COLUMNS,), float("-inf"), tl.float32)
    for block in range(blocks):
        here = block * COLUMNS + column
        value = tl.load(
            source + here.to(tl.int64) * column_stride, mask=here < count, other=float("-inf")
        )
        block_largest = tl.maximum(block_largest, value)
    largest = tl.max(block_largest, axis=0)
    # An empty segment has no maximum: shift by 0, every exp is then exactly 0.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    slot = tl.arange(0, BLOCKS)
    sums = tl.zeros((BLOCKS,), tl.float32)
    for block in range(blocks):
        here = block * COLUMNS + column
        value = tl.load(
            source + here.to(tl.int64) * column_stride, mask=here < count, other=float("-inf")
        )
        part = pair_sum(tl.reshape(exp(value - shift), (1, COLUMNS)), 1, COLUMNS, COLUMN_LEVELS)
        # A slot a block, not a running sum: the blocks are leaves of the same tree.
        sums = tl.where(slot == block, tl.broadcast_to(part, (BLOCKS,)), sums)
    total = pair_sum(tl.reshape(sums, (1, BLOCKS)), 1, BLOCKS, BLOCK_LEVELS)
    out = row * tl.num_programs(1) + segment + tl.arange(0, 1)
    tl.store(largest_ptr + out, tl.broadcast_to(largest, (1,)))
    tl.store(total_ptr + out, total)


@triton.jit(do_not_specialize=["rows"])
def combine_segments_kernel(
    largest_ptr,
    total_ptr,
    out_ptr,
    rows,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """[rows, SEGMENTS] maxima and sums -> [rows] log of the whole sum of exponentials."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (column < SEGMENTS)
    offset = row[:, None] * SEGMENTS + column
    largest = tl.load(largest_ptr + offset, mask=inside, other=float("-inf"))
    total = tl.load(total_ptr + offset, mask=inside, other=0.0)
    overall = tl.max(largest, axis=1)
    scaled = tl.where(inside, total * exp(largest - overall[:, None]), 0.0)
    result = overall + log(pair_sum(scaled, ROWS, COLUMNS, LEVELS))
    tl.store(out_ptr + row, result, mask=row < rows)


def launch_segment_statistics(
    logits: torch.Tensor, width: int, num_segments: int, real_columns: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.segment_statistics`; logits [rows, columns] fp32, any strides.

    Raises `ValueError` on another dtype, and where the segments are not filled from the left.
    """
    require(
        logits.dtype == torch.float32,
        f"segment_statistics kernel: logits are {logits.dtype}; it takes float32",
    )
    total_real = sum(real_columns)
    filled = [max(0, min(width, total_real - i * width)) for i in range(num_segments)]
    require(
        real_columns == filled and total_real <= logits.shape[1],
        f"segment_statistics kernel: real columns {real_columns} of segments of {width} over "
        f"{logits.shape[1]} columns must fill the segments from the left",
    )
    shape = (logits.shape[0], num_segments)
    largest, total = logits.new_empty(shape), logits.new_empty(shape)
    if largest.numel() == 0:
        return largest, total
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    blocks = triton.next_power_of_2(triton.cdiv(width, columns))
    segment_statistics_kernel[shape](
        logits, largest, total, total_real, width, logits.stride(0), logits.stride(1),
        COLUMNS=columns, COLUMN_LEVELS=columns.bit_length() - 1,
        BLOCKS=blocks, BLOCK_LEVELS=blocks.bit_length() - 1,
        num_warps=_WARPS, **UNFUSED,
    )  # fmt: skip
    return largest, total


def launch_combine_segments(largest: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """See `op.combine_segments`; both [rows, segments] fp32. Raises `ValueError` on others."""
    require(
        largest.dtype == total.dtype == torch.float32 and largest.shape == total.shape,
        f"combine_segments kernel: largest {largest.dtype} {tuple(largest.shape)} and total "
        f"{total.dtype} {tuple(total.shape)} must both be float32 [rows, segments]",
    )
    rows, segments = largest.shape
    out = largest.new_empty((rows,))
    if rows == 0:
        return out
    columns = triton.next_power_of_2(segments)
    combine_segments_kernel[(triton.cdiv(rows, _COMBINE_ROWS),)](
        largest.contiguous(), total.contiguous(), out, rows,
        SEGMENTS=segments, ROWS=_COMBINE_ROWS, COLUMNS=columns,
        LEVELS=columns.bit_length() - 1, num_warps=_COMBINE_WARPS, **UNFUSED,
    )  # fmt: skip
    return out
