"""Norm and rotation of all heads in one launch, read where the projection left them."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from ..elementary_kernel import UNFUSED, pair_sum
from ..formats import require
from ..launch import launch

# Up to this many tokens a token's steps of heads are programs of their own; beyond, one program
# does them all, so that it reads the token's cosines and sines once.
_FEW_TOKENS: Final = 256
# Heads of a step, and warps: with 16 heads of 128 and two warps a thread has two 16-byte loads of
# each half in flight.
_FEW: Final = (8, 4)
_MANY: Final = (16, 2)


@triton.jit
def norm_rotate(
    x_ptr, weight_ptr, out_ptr, token, first, token_stride, group_stride, head_stride,
    column, cos, sin, eps, HEADS: tl.constexpr, PER_GROUP: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """ROWS heads of one token from `first` on: halves (a, b), each normalised, rounded, times the
    weight, rounded -> (a cos - b sin, b cos + a sin), rounded."""
    head = first + tl.arange(0, ROWS)[:, None]
    inside = head < HEADS
    place = (head // PER_GROUP).to(tl.int64) * group_stride + (head % PER_GROUP) * head_stride
    source = x_ptr + token * token_stride + place + column
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    # The tree over a head is the trees over its halves, then their sum.
    total = pair_sum(a * a, ROWS, HALF, LEVELS) + pair_sum(b * b, ROWS, HALF, LEVELS)
    # A power of two divides exactly as its reciprocal multiplies.
    root = tl.sqrt_rn(total * (0.5 / HALF) + eps)
    scale = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), root)[:, None]
    narrow = out_ptr.dtype.element_ty
    left_weight = tl.load(weight_ptr + column).to(tl.float32)
    right_weight = tl.load(weight_ptr + HALF + column).to(tl.float32)
    a = ((a * scale).to(narrow).to(tl.float32) * left_weight).to(narrow).to(tl.float32)
    b = ((b * scale).to(narrow).to(tl.float32) * right_weight).to(narrow).to(tl.float32)
    target = out_ptr + (token * HEADS + head) * (2 * HALF) + column
    tl.store(target, (a * cos - b * sin).to(narrow), mask=inside)
    tl.store(target + HALF, (b * cos + a * sin).to(narrow), mask=inside)


@triton.jit
def qk_norm_rope_kernel(
    query_ptr, key_ptr, query_weight_ptr, key_weight_ptr, query_out_ptr, key_out_ptr,
    positions_ptr, table_ptr, eps, query_token_stride, query_group_stride, query_head_stride,
    key_token_stride, key_head_stride, positions_stride, QUERY_HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr, KEY_HEADS: tl.constexpr, QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr, HALF: tl.constexpr, LEVELS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Program (token, step): the query's steps of QUERY_ROWS heads first, then the key's; with
    TOGETHER one program does all of a token's."""
    token = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1)
    position = tl.load(positions_ptr + token * positions_stride).to(tl.int64)
    column = tl.arange(0, HALF)[None, :]
    row = table_ptr + position * (2 * HALF) + column
    cos, sin = tl.load(row), tl.load(row + HALF)
    QUERY_STEPS: tl.constexpr = (QUERY_HEADS + QUERY_ROWS - 1) // QUERY_ROWS
    KEY_STEPS: tl.constexpr = (KEY_HEADS + KEY_ROWS - 1) // KEY_ROWS
    if TOGETHER:
        for i in tl.static_range(QUERY_STEPS):
            norm_rotate(
                query_ptr, query_weight_ptr, query_out_ptr, token, i * QUERY_ROWS,
                query_token_stride, query_group_stride, query_head_stride, column, cos, sin, eps,
                QUERY_HEADS, PER_GROUP, QUERY_ROWS, HALF, LEVELS,
            )  # fmt: skip
        for i in tl.static_range(KEY_STEPS):
            norm_rotate(
                key_ptr, key_weight_ptr, key_out_ptr, token, i * KEY_ROWS,
                key_token_stride, 0, key_head_stride, column, cos, sin, eps,
                KEY_HEADS, KEY_HEADS, KEY_ROWS, HALF, LEVELS,
            )  # fmt: skip
    elif step < QUERY_STEPS:
        norm_rotate(
            query_ptr, query_weight_ptr, query_out_ptr, token, step * QUERY_ROWS,
            query_token_stride, query_group_stride, query_head_stride, column, cos, sin, eps,
            QUERY_HEADS, PER_GROUP, QUERY_ROWS, HALF, LEVELS,
        )  # fmt: skip
    else:
        norm_rotate(
            key_ptr, key_weight_ptr, key_out_ptr, token, (step - QUERY_STEPS) * KEY_ROWS,
            key_token_stride, 0, key_head_stride, column, cos, sin, eps,
            KEY_HEADS, KEY_HEADS, KEY_ROWS, HALF, LEVELS,
        )  # fmt: skip


def head_strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of token, group and head of x [tokens, heads, dim] or [tokens, groups, heads, dim]
    whose last dimension is dense."""
    return (x.stride(0), x.stride(1) if x.dim() == 4 else 0, x.stride(-2))


def check_heads(name: str, x: torch.Tensor) -> None:
    """`ValueError` unless the kernels can read the heads of `x` in place."""
    dim = x.shape[-1]
    require(
        x.dtype == torch.bfloat16 and x.stride(-1) == 1 and dim >= 16 and dim & (dim - 1) == 0,
        f"qk_norm_rope kernel: {name} is {x.dtype} {tuple(x.shape)} with strides {x.stride()}; it "
        "takes bfloat16, dense heads of a power of two from 16 on",
    )


def launch_qk_norm_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.qk_norm_rope`; any strides of tokens, groups and heads. `ValueError` on a dtype or a
    head size that the kernel does not take.

    A position is not compared with the table's length: that would wait for the GPU at every layer.
    """
    check_heads("query", query)
    check_heads("key", key)
    tokens, dim = query.shape[0], query.shape[-1]
    query_heads, key_heads = query.shape[1:-1].numel(), key.shape[1]
    query_out = query.new_empty((tokens, query_heads, dim))
    key_out = key.new_empty((tokens, key_heads, dim))
    if query_out.numel() == 0 and key_out.numel() == 0:
        return query_out, key_out
    few = tokens <= _FEW_TOKENS
    rows, warps = _FEW if few else _MANY
    query_rows = min(rows, triton.next_power_of_2(query_heads))
    key_rows = min(rows, triton.next_power_of_2(key_heads))
    steps = triton.cdiv(query_heads, query_rows) + triton.cdiv(key_heads, key_rows)
    key_token, _, key_head = head_strides(key)
    launch(
        qk_norm_rope_kernel,
        (tokens, steps if few else 1),
        (
            query,
            key,
            query_weight.contiguous(),
            key_weight.contiguous(),
            query_out,
            key_out,
            positions,
            table.contiguous(),
            eps,
            *head_strides(query),
            key_token,
            key_head,
            positions.stride(0),
        ),
        {
            "QUERY_HEADS": query_heads,
            "PER_GROUP": query.shape[-2],
            "KEY_HEADS": key_heads,
            "QUERY_ROWS": query_rows,
            "KEY_ROWS": key_rows,
            "HALF": dim // 2,
            "LEVELS": (dim // 2).bit_length() - 1,
            "TOGETHER": not few,
            "num_warps": warps,
            **UNFUSED,
        },
    )
    return query_out, key_out
