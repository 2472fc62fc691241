"""Rotary position embedding of query and key in one launch: each product and sum rounded."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from ..elementary_kernel import UNFUSED
from ..formats import require
from ..launch import launch

# Eight heads of 128 are one vector load of 16 bytes a thread for four warps; a token's cosines and
# sines are then read once for eight heads.
_HEADS: Final = 8
_WARPS: Final = 4


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, token, first_head, heads, token_stride, head_stride, dim_stride,
    cos, sin, HALF: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token: halves (a, b) -> (a cos - b sin, b cos + a sin)."""
    head = first_head + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (head < heads) & (column < HALF)
    source = x_ptr + token * token_stride + head.to(tl.int64) * head_stride + column * dim_stride
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF * dim_stride, mask=inside, other=0.0).to(tl.float32)
    target = out_ptr + (token * heads + head) * (2 * HALF) + column
    left = first * cos - second * sin
    right = second * cos + first * sin
    tl.store(target, left.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(target + HALF, right.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rope_kernel(
    query_ptr, key_ptr, query_out_ptr, key_out_ptr, positions_ptr, table_ptr,
    query_heads, key_heads, query_token_stride, query_head_stride, query_dim_stride,
    key_token_stride, key_head_stride, key_dim_stride, positions_stride, table_stride,
    HALF: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (token, block): the query's blocks of HEADS heads first, then the key's."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    position = tl.load(positions_ptr + token * positions_stride).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    row = table_ptr + position * table_stride + column
    cos = tl.load(row, mask=column < HALF, other=0.0)
    sin = tl.load(row + HALF, mask=column < HALF, other=0.0)
    query_blocks = tl.cdiv(query_heads, HEADS)
    if block < query_blocks:
        _rotate_heads(
            query_ptr, query_out_ptr, token, block * HEADS, query_heads,
            query_token_stride, query_head_stride, query_dim_stride, cos, sin, HALF, HEADS, COLUMNS,
        )  # fmt: skip
    else:
        _rotate_heads(
            key_ptr, key_out_ptr, token, (block - query_blocks) * HEADS, key_heads,
            key_token_stride, key_head_stride, key_dim_stride, cos, sin, HALF, HEADS, COLUMNS,
        )  # fmt: skip


def launch_rope(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.rope`; any strides. Raises `ValueError` on a dtype that the kernel does not take.

    A position is not compared with the table's length: that would wait for the GPU at every layer.
    """
    require(
        query.dtype == key.dtype and query.dtype in (torch.bfloat16, torch.float32),
        f"rope kernel: query {query.dtype} and key {key.dtype} must both be bfloat16 or float32",
    )
    tokens, query_heads, head_dim = query.shape
    key_heads = key.shape[1]
    query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
    table = table.contiguous()
    blocks = triton.cdiv(query_heads, _HEADS) + triton.cdiv(key_heads, _HEADS)
    if tokens == 0 or blocks == 0:
        return query_out, key_out
    launch(
        rope_kernel,
        (tokens, blocks),
        (
            query,
            key,
            query_out,
            key_out,
            positions,
            table,
            query_heads,
            key_heads,
            *query.stride(),
            *key.stride(),
            positions.stride(0),
            head_dim,
        ),
        {
            "HALF": head_dim // 2,
            "HEADS": _HEADS,
            "COLUMNS": triton.next_power_of_2(head_dim // 2),
            "num_warps": _WARPS,
            **UNFUSED,
        },
    )
    return query_out, key_out
