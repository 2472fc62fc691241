"""The steps that every Triton attention kernel shares, so that all of them have one order.

Keys are numbered from the first of their sequence. BLOCK_KEYS keys make a block, CHUNK_BLOCKS
blocks a chunk, both aligned at key 0. Inside a chunk a query's softmax is updated block by block
(Milakov and Gimelshein, 2018, arXiv 1805.02867); chunks are independent of each other and are added
in increasing order. So a chunk has the same bits whether one program walks all chunks of a query or
each chunk has a program of its own. What a query does not see is an exact no-op: a weight of zero,
a correction of one. Exponentials are of base 2, log2(e) is in the scale.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

# Part of the definition: another number is another order.
BLOCK_KEYS: Final = 64
CHUNK_BLOCKS: Final = 4
# Columns of the product that adds up the weights; all have the same number.
SUM_COLUMNS = tl.constexpr(16)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def no_keys(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The state of a chunk before its first block: maximum, sum [ROWS, 16], weighted values."""
    return (
        tl.full((ROWS,), float("-inf"), tl.float32),
        tl.zeros((ROWS, SUM_COLUMNS), tl.float32),
        tl.zeros((ROWS, COLUMNS), tl.float32),
    )


@triton.jit
def visit_block(
    q, largest, total, values, key_ptr, value_ptr, slot_ptr, first_slot, block, position, keys,
    log2_scale, key_stride, value_stride,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PAGED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys enters the state of its chunk. MASKED: some row may not see all of it."""
    number = block * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)
    exists = number < keys
    if PAGED:
        if MASKED:
            slot = tl.load(slot_ptr + number, mask=exists, other=0).to(tl.int64)
        else:
            slot = tl.load(slot_ptr + number).to(tl.int64)
    else:
        slot = (first_slot + number).to(tl.int64)
    k_at = key_ptr + slot[None, :] * key_stride + column[:, None]
    v_at = value_ptr + slot[:, None] * value_stride + column[None, :]
    if MASKED:
        inside = column < HEAD_DIM
        k = tl.load(k_at, mask=exists[None, :] & inside[:, None], other=0.0)
        v = tl.load(v_at, mask=exists[:, None] & inside[None, :], other=0.0)
    elif COLUMNS != HEAD_DIM:
        inside = column < HEAD_DIM
        k = tl.load(k_at, mask=inside[:, None], other=0.0)
        v = tl.load(v_at, mask=inside[None, :], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    scores = tl.dot(q, k, input_precision="ieee")
    if MASKED:
        scores = tl.where(position[:, None] >= number[None, :], scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1) * log2_scale)
    # Where a row has seen no key of this chunk, -inf - -inf would be no number.
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(tl.fma(scores, log2_scale, -shift[:, None])).to(v.dtype)
    correction = tl.exp2(largest - shift)[:, None]
    # A sum by the tensor core has one order in every layout of the block, `tl.sum` has not.
    ones = tl.full((BLOCK, SUM_COLUMNS), 1.0, tl.float32).to(v.dtype)
    total = tl.dot(weights, ones, total * correction, input_precision="ieee")
    values = tl.dot(weights, v, values * correction, input_precision="ieee")
    return new_largest, total, values


@triton.jit
def add_chunk(largest, total, values, chunk_largest, chunk_total, chunk_values):
    """The chunks up to here, and the next: maximum [R], sum [R], weighted values [R, C] of both."""
    new_largest = tl.maximum(largest, chunk_largest)
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    old = tl.exp2(largest - shift)
    new = tl.exp2(chunk_largest - shift)
    total = tl.fma(chunk_total, new, total * old)
    values = tl.fma(chunk_values, new[:, None], values * old[:, None])
    return new_largest, total, values


@triton.jit
def finish(largest, total, values):
    """(weighted mean [R, C], log-sum-exp [R], natural logarithm). A zero is +0: chunks that a query
    does not see turn -0 into +0."""
    out = values * tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total)[:, None] + 0.0
    return out, (largest + tl.log2(total)) * _LN2
