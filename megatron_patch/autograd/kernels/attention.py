"""Backward of causal attention in Triton, the same bits on every call.

Two passes, so that nothing is added with atomics: a program of the first owns a block of keys of
one key head and walks the queries of its group, a program of the second owns a block of queries
of one head and walks its keys (the products of Dao, 2023, arXiv 2307.08691, section 3.1). The
probabilities are made again from the log-sum-exp. Rows of a grouped query head are added in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

_LOG2E: Final = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class BackwardTile:
    """Keys and queries of a block, warps, pipeline stages."""

    keys: int
    queries: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["tokens"])
def delta_kernel(
    out_ptr, gradient_ptr, delta_ptr, tokens, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta[head, token] = sum(out * gradient) over head_dim, fp32."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    exists = row < tokens * HEADS
    at = row[:, None] * HEAD_DIM + column[None, :]
    inside = exists[:, None] & (column < HEAD_DIM)[None, :]
    out = tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_ptr + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(out * gradient, axis=1)
    tl.store(delta_ptr + (row % HEADS) * tokens + row // HEADS, total, mask=exists)


@triton.jit
def _rows(pointer, token, token_stride, column, exists, HEAD_DIM, COLUMNS):
    """[tokens, COLUMNS] of one head; zeros past the end."""
    at = pointer + token.to(tl.int64)[:, None] * token_stride + column[None, :]
    if COLUMNS == HEAD_DIM:
        return tl.load(at, mask=exists[:, None], other=0.0)
    return tl.load(at, mask=exists[:, None] & (column < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _columns(pointer, token, token_stride, column, exists, HEAD_DIM, COLUMNS):
    """[COLUMNS, tokens], the transpose of `_rows`."""
    at = pointer + token.to(tl.int64)[None, :] * token_stride + column[:, None]
    if COLUMNS == HEAD_DIM:
        return tl.load(at, mask=exists[None, :], other=0.0)
    return tl.load(at, mask=exists[None, :] & (column < HEAD_DIM)[:, None], other=0.0)


@triton.jit
def _visit_queries(
    k, v, dk, dv, q_ptr, g_ptr, lse_ptr, delta_ptr, start, block, length, position, log2_scale,
    query_stride, gradient_stride,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """One block of queries adds its share to the gradients of a block of keys."""
    number = block * QUERIES + tl.arange(0, QUERIES)
    exists = number < length
    column = tl.arange(0, COLUMNS)
    token = start + number
    q_columns = _columns(q_ptr, token, query_stride, column, exists, HEAD_DIM, COLUMNS)
    gradient = _rows(g_ptr, token, gradient_stride, column, exists, HEAD_DIM, COLUMNS)
    # A query that is not there has an infinite sum of weights, and so weights of zero.
    lse = tl.load(lse_ptr + token, mask=exists, other=float("inf")) * 1.4426950408889634
    delta = tl.load(delta_ptr + token, mask=exists, other=0.0)
    scores = tl.dot(k, q_columns, input_precision="ieee")
    weights = tl.exp2(scores * log2_scale - lse[None, :])
    weights = tl.where(position[:, None] <= number[None, :], weights, 0.0)
    dv = tl.dot(weights.to(gradient.dtype), gradient, dv, input_precision="ieee")
    dweights = tl.dot(v, tl.trans(gradient), input_precision="ieee")
    dscores = weights * (dweights - delta[None, :])
    dk = tl.dot(dscores.to(gradient.dtype), tl.trans(q_columns), dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["tokens"])
def keys_kernel(
    query_ptr, key_ptr, value_ptr, gradient_ptr, lse_ptr, delta_ptr, dkey_ptr, dvalue_ptr,
    starts_ptr, tokens, log2_scale, scale,
    query_token_stride, query_head_stride, key_token_stride, key_head_stride,
    value_token_stride, value_head_stride, gradient_token_stride, gradient_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    KEYS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Program (key block, key head, sequence): dkey and dvalue, over the group's heads in order."""
    kv_head = tl.program_id(1)
    start = tl.load(starts_ptr + tl.program_id(2))
    length = tl.load(starts_ptr + tl.program_id(2) + 1) - start
    # The first keys are seen by the most queries, and start first.
    first = tl.program_id(0) * KEYS
    if first < length:
        position = first + tl.arange(0, KEYS)
        exists = position < length
        column = tl.arange(0, COLUMNS)
        token = start + position
        k_ptr = key_ptr + kv_head.to(tl.int64) * key_head_stride
        v_ptr = value_ptr + kv_head.to(tl.int64) * value_head_stride
        k = _rows(k_ptr, token, key_token_stride, column, exists, HEAD_DIM, COLUMNS)
        v = _rows(v_ptr, token, value_token_stride, column, exists, HEAD_DIM, COLUMNS)
        dk = tl.zeros((KEYS, COLUMNS), tl.float32)
        dv = tl.zeros((KEYS, COLUMNS), tl.float32)
        blocks = (length + QUERIES - 1) // QUERIES
        for member in range(GROUP):
            head = (kv_head * GROUP + member).to(tl.int64)
            q_ptr = query_ptr + head * query_head_stride
            g_ptr = gradient_ptr + head * gradient_head_stride
            for block in range(first // QUERIES, blocks):
                dk, dv = _visit_queries(
                    k, v, dk, dv, q_ptr, g_ptr, lse_ptr + head * tokens, delta_ptr + head * tokens,
                    start, block, length, position, log2_scale, query_token_stride,
                    gradient_token_stride, HEAD_DIM, COLUMNS, QUERIES,
                )  # fmt: skip
        inside = exists[:, None] & (column < HEAD_DIM)[None, :]
        heads = tl.num_programs(1)
        at = (token.to(tl.int64)[:, None] * heads + kv_head) * HEAD_DIM + column[None, :]
        tl.store(dkey_ptr + at, (dk * scale).to(dkey_ptr.dtype.element_ty), mask=inside)
        tl.store(dvalue_ptr + at, dv.to(dvalue_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _visit_keys(
    q, gradient, dq, k_ptr, v_ptr, lse, delta, start, block, length, number, log2_scale,
    key_stride, value_stride,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys adds its share to the gradient of a block of queries."""
    position = block * KEYS + tl.arange(0, KEYS)
    exists = position < length
    column = tl.arange(0, COLUMNS)
    token = start + position
    k_columns = _columns(k_ptr, token, key_stride, column, exists, HEAD_DIM, COLUMNS)
    v_columns = _columns(v_ptr, token, value_stride, column, exists, HEAD_DIM, COLUMNS)
    scores = tl.dot(q, k_columns, input_precision="ieee")
    weights = tl.exp2(scores * log2_scale - lse[:, None])
    if MASKED:
        weights = tl.where(position[None, :] <= number[:, None], weights, 0.0)
    dweights = tl.dot(gradient, v_columns, input_precision="ieee")
    dscores = weights * (dweights - delta[:, None])
    return tl.dot(dscores.to(q.dtype), tl.trans(k_columns), dq, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens"])
def queries_kernel(
    query_ptr, key_ptr, value_ptr, gradient_ptr, lse_ptr, delta_ptr, dquery_ptr,
    starts_ptr, tokens, log2_scale, scale,
    query_token_stride, query_head_stride, key_token_stride, key_head_stride,
    value_token_stride, value_head_stride, gradient_token_stride, gradient_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    KEYS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Program (query block, head, sequence): dquery, over keys in increasing order."""
    head = tl.program_id(1).to(tl.int64)
    start = tl.load(starts_ptr + tl.program_id(2))
    length = tl.load(starts_ptr + tl.program_id(2) + 1) - start
    # The last queries see the most keys, and start first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    if first < length:
        number = first + tl.arange(0, QUERIES)
        exists = number < length
        column = tl.arange(0, COLUMNS)
        token = start + number
        kv_head = head // GROUP
        q_ptr = query_ptr + head * query_head_stride
        g_ptr = gradient_ptr + head * gradient_head_stride
        k_ptr = key_ptr + kv_head * key_head_stride
        v_ptr = value_ptr + kv_head * value_head_stride
        q = _rows(q_ptr, token, query_token_stride, column, exists, HEAD_DIM, COLUMNS)
        gradient = _rows(g_ptr, token, gradient_token_stride, column, exists, HEAD_DIM, COLUMNS)
        lse = tl.load(lse_ptr + head * tokens + token, mask=exists, other=float("inf"))
        lse = lse * 1.4426950408889634
        delta = tl.load(delta_ptr + head * tokens + token, mask=exists, other=0.0)
        dq = tl.zeros((QUERIES, COLUMNS), tl.float32)
        whole = (first + 1) // KEYS
        blocks = (tl.minimum(first + QUERIES, length) + KEYS - 1) // KEYS
        for block in range(0, whole):
            dq = _visit_keys(
                q, gradient, dq, k_ptr, v_ptr, lse, delta, start, block, length, number,
                log2_scale, key_token_stride, value_token_stride, HEAD_DIM, COLUMNS, KEYS, False,
            )  # fmt: skip
        for block in range(whole, blocks):
            dq = _visit_keys(
                q, gradient, dq, k_ptr, v_ptr, lse, delta, start, block, length, number,
                log2_scale, key_token_stride, value_token_stride, HEAD_DIM, COLUMNS, KEYS, True,
            )  # fmt: skip
        at = (token.to(tl.int64)[:, None] * tl.num_programs(1) + head) * HEAD_DIM + column[None, :]
        inside = exists[:, None] & (column < HEAD_DIM)[None, :]
        tl.store(dquery_ptr + at, (dq * scale).to(dquery_ptr.dtype.element_ty), mask=inside)


def launch_backward(
    out_gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
    *,
    keys_tile: BackwardTile | None = None,
    queries_tile: BackwardTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim].

    lse: [heads, tokens] fp32; starts: [sequences + 1] int32 on the device; longest: the most tokens
    of a sequence. Tiles change the bits; the default ones are a function of head_dim alone.
    """
    inputs = (query, key, value, out, out_gradient)
    query, key, value, out, out_gradient = (
        x if x.stride(2) == 1 else x.contiguous() for x in inputs
    )
    out, out_gradient = out.contiguous(), out_gradient.contiguous()
    tokens, heads, head_dim = query.shape
    kv_heads, sequences = key.shape[1], starts.shape[0] - 1
    columns = max(16, triton.next_power_of_2(head_dim))
    dquery, dkey, dvalue = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)
    )
    if tokens == 0:
        return dquery, dkey, dvalue
    delta = torch.empty_like(lse)
    rows = 16
    delta_kernel[(triton.cdiv(tokens * heads, rows),)](
        out, out_gradient, delta, tokens,
        HEADS=heads, HEAD_DIM=head_dim, COLUMNS=columns, ROWS=rows, num_warps=4,
    )  # fmt: skip
    wide = columns > 128
    tile = keys_tile or (BackwardTile(32, 32, 4, 1) if wide else BackwardTile(64, 64, 4, 2))
    shared = (
        starts, tokens, scale * _LOG2E, scale,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *out_gradient.stride()[:2],
    )  # fmt: skip
    shape = {"GROUP": heads // kv_heads, "HEAD_DIM": head_dim, "COLUMNS": columns}
    keys_kernel[(triton.cdiv(longest, tile.keys), kv_heads, sequences)](
        query, key, value, out_gradient, lse, delta, dkey, dvalue, *shared, **shape,
        KEYS=tile.keys, QUERIES=tile.queries, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    tile = queries_tile or (BackwardTile(32, 32, 4, 1) if wide else BackwardTile(64, 64, 4, 2))
    queries_kernel[(triton.cdiv(longest, tile.queries), heads, sequences)](
        query, key, value, out_gradient, lse, delta, dquery, *shared, **shape,
        KEYS=tile.keys, QUERIES=tile.queries, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dquery, dkey, dvalue
