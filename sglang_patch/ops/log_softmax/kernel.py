"""Statistics of vocabulary segments, their combination, and whole rows of logprobs.

A segment is read in blocks; groups of up to 128 columns are summed as a pair tree without leaving a
warp, and the groups of all blocks are added as a pair tree once. That is the pair tree over the
whole segment, so the bits do not depend on the block, on the rows, or on which rank holds the
segment, and equal the CPU's.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from ..elementary_kernel import UNFUSED, exp, log, pair_sum
from ..formats import require
from ..launch import launch

# 32 groups over eight warps: 16 fp32 a thread, four 16-byte loads in flight.
_GROUPS: Final = 32
_LANES: Final = 128
_WARPS: Final = 8
# Rows of at most a few dozen numbers: one warp holds several.
_COMBINE_ROWS: Final = 16
_COMBINE_WARPS: Final = 1
_ROW_COLUMNS: Final = 2048
_ROW_WARPS: Final = 8


@triton.jit
def divided(logits, temperature):
    """logits / temperature, correctly rounded; a division by one is exact and left out."""
    if temperature != 1.0:
        logits = tl.div_rn(logits, temperature)
    return logits


@triton.jit
def segment_statistics_kernel(
    logits_ptr,
    temperature_ptr,
    targets_ptr,
    largest_ptr,
    total_ptr,
    chosen_ptr,
    weighted_ptr,
    real_columns,
    width,
    first_column,
    row_stride,
    column_stride,
    temperature_stride,
    HAS_TARGETS: tl.constexpr,
    ENTROPY: tl.constexpr,
    ALIGNED: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    LANE_LEVELS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_LEVELS: tl.constexpr,
):
    """Program (row, segment): see `op.token_statistics`; no temperature: the logits are scaled."""
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    start = segment * width
    count = tl.maximum(tl.minimum(real_columns - start, width), 0)
    if ALIGNED:
        # Four neighbours are then inside or outside together: one load of 16 bytes.
        count = tl.multiple_of(count, 4)
    COLUMNS: tl.constexpr = GROUPS * LANES
    column = tl.arange(0, GROUPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    source = logits_ptr + row * row_stride + start.to(tl.int64) * column_stride
    blocks = tl.cdiv(count, COLUMNS)
    block_largest = tl.full((GROUPS, LANES), float("-inf"), tl.float32)
    for block in range(blocks):
        here = block * COLUMNS + column
        value = tl.load(
            source + here.to(tl.int64) * column_stride, mask=here < count, other=float("-inf")
        )
        block_largest = tl.maximum(block_largest, value.to(tl.float32))
    # Division keeps order, so the largest quotient is the quotient of the largest.
    largest = tl.max(tl.max(block_largest, axis=1), axis=0)
    temperature = 1.0
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row * temperature_stride)
        largest = divided(largest, temperature)
    # An empty segment has no maximum: shift by 0, every exp is then exactly 0.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    slot = tl.arange(0, BLOCKS)[:, None]
    sums = tl.zeros((BLOCKS, GROUPS), tl.float32)
    weighted_sums = tl.zeros((BLOCKS, GROUPS), tl.float32)
    for block in range(blocks):
        here = block * COLUMNS + column
        value = tl.load(
            source + here.to(tl.int64) * column_stride, mask=here < count, other=float("-inf")
        ).to(tl.float32)
        if temperature_ptr is not None:
            value = divided(value, temperature)
        shifted = value - shift
        exponential = exp(shifted)
        part = pair_sum(exponential, GROUPS, LANES, LANE_LEVELS)
        # A slot a block, not a running sum: the blocks are leaves of the same tree.
        sums = tl.where(slot == block, part[None, :], sums)
        if ENTROPY:
            product = tl.where(here < count, exponential * shifted, 0.0)
            part = pair_sum(product, GROUPS, LANES, LANE_LEVELS)
            weighted_sums = tl.where(slot == block, part[None, :], weighted_sums)
    out = row * tl.num_programs(1) + segment + tl.arange(0, 1)
    tl.store(largest_ptr + out, tl.broadcast_to(largest, (1,)))
    rest: tl.constexpr = BLOCKS * GROUPS
    total = pair_sum(tl.reshape(sums, (1, rest)), 1, rest, BLOCK_LEVELS)
    tl.store(total_ptr + out, total)
    if ENTROPY:
        weighted = pair_sum(tl.reshape(weighted_sums, (1, rest)), 1, rest, BLOCK_LEVELS)
        tl.store(weighted_ptr + out, weighted)
    if HAS_TARGETS:
        local = tl.load(targets_ptr + row) - first_column - start
        inside = (local >= 0) & (local < count)
        chosen = tl.load(source + local * column_stride, mask=inside, other=0.0).to(tl.float32)
        if temperature_ptr is not None:
            chosen = divided(chosen, temperature)
        tl.store(chosen_ptr + out, tl.broadcast_to(chosen, (1,)))


@triton.jit
def _normaliser(
    largest_ptr,
    total_ptr,
    row,
    rows,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Log of the whole sum of exponentials of `ROWS` rows, and what it is made of."""
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (column < SEGMENTS)
    offset = row[:, None] * SEGMENTS + column
    largest = tl.load(largest_ptr + offset, mask=inside, other=float("-inf"))
    total = tl.load(total_ptr + offset, mask=inside, other=0.0)
    overall = tl.max(largest, axis=1)
    factor = exp(largest - overall[:, None])
    sum_of_all = pair_sum(tl.where(inside, total * factor, 0.0), ROWS, COLUMNS, LEVELS)
    return overall + log(sum_of_all), sum_of_all, largest, total, factor, overall, offset, inside


@triton.jit(do_not_specialize=["rows"])
def combine_segments_kernel(
    largest_ptr,
    total_ptr,
    weighted_ptr,
    out_ptr,
    rows,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """[rows, SEGMENTS] statistics -> [rows] log of the sum of exponentials, or the entropy."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    result, sum_of_all, largest, total, factor, overall, offset, inside = _normaliser(
        largest_ptr, total_ptr, row, rows, SEGMENTS, ROWS, COLUMNS, LEVELS
    )
    if weighted_ptr is not None:
        weighted = tl.load(weighted_ptr + offset, mask=inside, other=0.0)
        # An empty segment has no distance from the overall maximum.
        distance = tl.where(largest == float("-inf"), 0.0, largest - overall[:, None])
        moved = tl.where(inside, factor * (weighted + total * distance), 0.0)
        mean = tl.div_rn(pair_sum(moved, ROWS, COLUMNS, LEVELS), sum_of_all)
        result = log(sum_of_all) - mean
    tl.store(out_ptr + row, result, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def log_softmax_kernel(
    logits_ptr,
    temperature_ptr,
    largest_ptr,
    total_ptr,
    out_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    temperature_stride,
    SEGMENTS: tl.constexpr,
    SLOTS: tl.constexpr,
    LEVELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (row, block of columns): logit / temperature - normaliser."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    # Combined by every program of the row: a handful of numbers, and no launch of its own.
    normaliser, _, _, _, _, _, _, _ = _normaliser(
        largest_ptr, total_ptr, row + tl.arange(0, 1), rows, SEGMENTS, 1, SLOTS, LEVELS
    )
    source = logits_ptr + row * row_stride + column.to(tl.int64) * column_stride
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if temperature_ptr is not None:
        value = divided(value, tl.load(temperature_ptr + row * temperature_stride))
    tl.store(out_ptr + row * columns + column, value - normaliser, mask=inside)


def _temperature(temperature: torch.Tensor | None, rows: int) -> tuple[torch.Tensor | None, int]:
    """The numbers as the kernels read them, and their stride: one for all rows, or one a row."""
    if temperature is None:
        return None, 0
    require(
        temperature.dtype == torch.float32 and temperature.numel() in (1, rows),
        f"temperature: {temperature.dtype} {tuple(temperature.shape)} for {rows} rows; it must be "
        "float32, one number or one a row",
    )
    flat = temperature.reshape(-1).contiguous()
    return flat, 0 if flat.numel() == 1 else 1


def _is_vector_aligned(logits: torch.Tensor, width: int, real: int) -> bool:
    return logits.stride(0) % 4 == 0 and width % 4 == 0 and real % 4 == 0


def launch_statistics(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    targets: torch.Tensor | None,
    first_column: int,
    width: int,
    num_segments: int,
    real_columns: list[int],
    entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `op.token_statistics`; logits [rows, columns] fp32 or bf16, any strides.

    Without targets the third tensor, and without `entropy` the fourth, is empty. Raises
    `ValueError` on another dtype, and where the segments are not filled from the left.
    """
    scaled = temperature is None
    require(
        logits.dtype == torch.float32 or (logits.dtype == torch.bfloat16 and not scaled),
        f"segment statistics kernel: logits are {logits.dtype}; it takes float32, or bfloat16 as "
        "an lm_head left them",
    )
    rows = logits.shape[0]
    total_real = sum(real_columns)
    filled = [max(0, min(width, total_real - i * width)) for i in range(num_segments)]
    require(
        real_columns == filled and total_real <= logits.shape[1],
        f"segment statistics kernel: real columns {real_columns} of segments of {width} over "
        f"{logits.shape[1]} columns must fill the segments from the left",
    )
    largest, total, chosen, weighted = (
        logits.new_empty((rows, num_segments if used else 0), dtype=torch.float32)
        for used in (True, True, targets is not None, entropy)
    )
    if largest.numel() == 0:
        return largest, total, chosen, weighted
    numbers, temperature_stride = _temperature(temperature, rows)
    columns = min(_GROUPS * _LANES, triton.next_power_of_2(width))
    lanes = min(_LANES, columns)
    groups = columns // lanes
    blocks = triton.next_power_of_2(triton.cdiv(width, columns))
    launch(
        segment_statistics_kernel,
        (rows, num_segments),
        (
            logits, numbers, None if targets is None else targets.contiguous(),
            largest, total, chosen, weighted,
            total_real, width, first_column, *logits.stride(), temperature_stride,
        ),
        {
            "HAS_TARGETS": targets is not None, "ENTROPY": entropy,
            "ALIGNED": _is_vector_aligned(logits, width, total_real),
            "GROUPS": groups, "LANES": lanes, "LANE_LEVELS": lanes.bit_length() - 1,
            "BLOCKS": blocks, "BLOCK_LEVELS": (blocks * groups).bit_length() - 1,
            "num_warps": _WARPS, **UNFUSED,
        },
    )  # fmt: skip
    return largest, total, chosen, weighted


def _require_statistics(name: str, *statistics: torch.Tensor) -> None:
    require(
        all(s.dtype == torch.float32 and s.shape == statistics[0].shape for s in statistics),
        f"{name} kernel: {', '.join(f'{s.dtype} {tuple(s.shape)}' for s in statistics)} must all "
        "be float32 [rows, segments]",
    )


def launch_combine_segments(
    largest: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor | None = None
) -> torch.Tensor:
    """See `op.combine_segments`, and with `weighted` `op.combine_entropy`; all [rows, segments]
    fp32. Raises `ValueError` on others."""
    given = (largest, total) if weighted is None else (largest, total, weighted)
    _require_statistics("combine_segments", *given)
    rows, segments = largest.shape
    out = largest.new_empty((rows,))
    if rows == 0:
        return out
    columns = triton.next_power_of_2(segments)
    launch(
        combine_segments_kernel,
        (triton.cdiv(rows, _COMBINE_ROWS),),
        (
            largest.contiguous(), total.contiguous(),
            None if weighted is None else weighted.contiguous(), out, rows,
        ),
        {
            "SEGMENTS": segments, "ROWS": _COMBINE_ROWS, "COLUMNS": columns,
            "LEVELS": columns.bit_length() - 1, "num_warps": _COMBINE_WARPS, **UNFUSED,
        },
    )  # fmt: skip
    return out


def launch_log_softmax(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    largest: torch.Tensor,
    total: torch.Tensor,
    columns: int,
) -> torch.Tensor:
    """See `op.log_softmax`: [rows, columns] fp32 from logits and their segments' statistics."""
    _require_statistics("log_softmax", largest, total)
    rows = logits.shape[0]
    out = logits.new_empty((rows, columns), dtype=torch.float32)
    if out.numel() == 0:
        return out
    numbers, temperature_stride = _temperature(temperature, rows)
    segments = largest.shape[1]
    slots = triton.next_power_of_2(segments)
    launch(
        log_softmax_kernel,
        (rows, triton.cdiv(columns, _ROW_COLUMNS)),
        (
            logits, numbers, largest.contiguous(), total.contiguous(), out, rows, columns,
            *logits.stride(), temperature_stride,
        ),
        {
            "SEGMENTS": segments, "SLOTS": slots, "LEVELS": slots.bit_length() - 1,
            "COLUMNS": _ROW_COLUMNS, "num_warps": _ROW_WARPS, **UNFUSED,
        },
    )  # fmt: skip
    return out
