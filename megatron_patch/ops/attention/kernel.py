"""Causal attention over packed sequences: FA3 on Hopper, a Triton forward elsewhere.

Both walk the keys of a query once, from the first to its own, in one split, so a query's bits are
the same in a prefill, in a chunk and in a decode step. The two kernels have different bits: a run
uses one of them, chosen by the GPU alone.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from ..elementary_kernel import UNFUSED
from ..formats import require
from .op import FLASH3_HEAD_DIM

# One tile for prefill and decode: the height of a product may not change with the number of
# queries. Scores of 64 x 64 and a 128-wide accumulator are 96 registers a thread over 4 warps.
_BLOCK_QUERIES: Final = 64
_BLOCK_KEYS: Final = 64
_WARPS: Final = 4
_STAGES: Final = 2
_MAX_HEAD_DIM: Final = 256
_LOG2E: Final = 1.4426950408889634
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["tokens"])
def attention_kernel(
    query_ptr, key_ptr, value_ptr, out_ptr, lse_ptr, query_starts_ptr, key_starts_ptr,
    tokens, heads, group, log2_scale,
    query_token_stride, query_head_stride, key_token_stride, key_head_stride,
    value_token_stride, value_head_stride,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Program (query block, head, sequence): online softmax over key blocks in increasing order.

    Blocks start at multiples of BLOCK_KEYS from the sequence's first key. A block that a query does
    not see multiplies its state by one and adds zero.
    """
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    query_start = tl.load(query_starts_ptr + sequence)
    queries = tl.load(query_starts_ptr + sequence + 1) - query_start
    key_start = tl.load(key_starts_ptr + sequence)
    keys = tl.load(key_starts_ptr + sequence + 1) - key_start
    first = tl.program_id(0) * BLOCK_QUERIES
    if first < queries:
        number = first + tl.arange(0, BLOCK_QUERIES)
        token = (query_start + number).to(tl.int64)
        # A sequence's queries are its last keys: a cached prefix comes first.
        position = number + (keys - queries)
        column = tl.arange(0, COLUMNS)
        inside = (number < queries)[:, None] & (column < HEAD_DIM)[None, :]
        kv_head = (head // group).to(tl.int64)
        q = tl.load(
            query_ptr + token[:, None] * query_token_stride
            + head.to(tl.int64) * query_head_stride + column[None, :],
            mask=inside, other=0.0,
        )  # fmt: skip
        largest = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_QUERIES,), tl.float32)
        accumulator = tl.zeros((BLOCK_QUERIES, COLUMNS), tl.float32)
        last = tl.minimum(first + BLOCK_QUERIES, queries) + (keys - queries)
        for start in range(0, last, BLOCK_KEYS):
            number_k = start + tl.arange(0, BLOCK_KEYS)
            token_k = (key_start + number_k).to(tl.int64)
            k = tl.load(
                key_ptr + token_k[None, :] * key_token_stride
                + kv_head * key_head_stride + column[:, None],
                mask=(number_k < keys)[None, :] & (column < HEAD_DIM)[:, None], other=0.0,
            )  # fmt: skip
            v = tl.load(
                value_ptr + token_k[:, None] * value_token_stride
                + kv_head * value_head_stride + column[None, :],
                mask=(number_k < keys)[:, None] & (column < HEAD_DIM)[None, :], other=0.0,
            )  # fmt: skip
            scores = tl.dot(q, k, input_precision="ieee") * log2_scale
            scores = tl.where(position[:, None] >= number_k[None, :], scores, float("-inf"))
            # Key 0 is visible to every query, so the maximum is finite from the first block on.
            new_largest = tl.maximum(largest, tl.max(scores, axis=1))
            weights = tl.exp2(scores - new_largest[:, None])
            correction = tl.exp2(largest - new_largest)
            total = total * correction + tl.sum(weights, axis=1)
            accumulator = accumulator * correction[:, None]
            accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision="ieee")
            largest = new_largest
        out = tl.div_rn(accumulator, tl.broadcast_to(total[:, None], (BLOCK_QUERIES, COLUMNS)))
        target = out_ptr + (token[:, None] * heads + head) * HEAD_DIM + column[None, :]
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=inside)
        lse = (largest + tl.log2(total)) * _LN2
        tl.store(lse_ptr + head.to(tl.int64) * tokens + token, lse, mask=number < queries)


def _starts(lengths: list[int], device: torch.device) -> torch.Tensor:
    """Cumulative sequence starts, [sequences + 1] int32."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return torch.tensor(starts, dtype=torch.int32, device=device)


def launch_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: list[int],
    key_lengths: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Triton forward; see `launch_attention`."""
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    tokens, heads, head_dim = query.shape
    out = query.new_empty(query.shape)
    lse = query.new_empty((heads, tokens), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    grid = (triton.cdiv(max(query_lengths), _BLOCK_QUERIES), heads, len(query_lengths))
    attention_kernel[grid](
        query, key, value, out, lse,
        _starts(query_lengths, query.device), _starts(key_lengths, query.device),
        tokens, heads, heads // key.shape[1], scale * _LOG2E,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        HEAD_DIM=head_dim, COLUMNS=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_QUERIES=_BLOCK_QUERIES, BLOCK_KEYS=_BLOCK_KEYS,
        num_warps=_WARPS, num_stages=_STAGES, **UNFUSED,
    )  # fmt: skip
    return out, lse


def _page_table(key_lengths: list[int], device: torch.device) -> torch.Tensor:
    """[sequences, longest] int32: the number of each key among all keys; past the end of a
    sequence any number that exists."""
    starts = _starts(key_lengths, device)[:-1]
    table = starts[:, None] + torch.arange(max(key_lengths), device=device, dtype=torch.int32)
    return table.clamp_max(sum(key_lengths) - 1).to(torch.int32)


def launch_flash3(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: list[int],
    key_lengths: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention-3's forward from SGLang's kernel package, one split; see `launch_attention`.

    Queries that are the last of longer keys (a chunk, a decode step) go through pages of one key,
    as the engine's do. In whole keys FA3 gives a single query other bits than a prefill has
    (measured on an H200 at 300 keys). Heads of 64 have them in pages of one key too, so only heads
    of 128 are taken. Raises `ValueError` on others.

    Upstream: sgl_kernel.flash_attn, `flash_attn_varlen_func` and `flash_attn_with_kvcache`
    (sglang-kernel 0.4.5).
    """
    require(
        query.shape[2] == FLASH3_HEAD_DIM,
        f"attention: head_dim={query.shape[2]}; FA3's decode has the bits of its prefill for "
        f"head_dim={FLASH3_HEAD_DIM} alone",
    )
    from sgl_kernel.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    if query_lengths != key_lengths:
        out, lse = flash_attn_with_kvcache(
            query.contiguous(),
            key.contiguous().unsqueeze(1),
            value.contiguous().unsqueeze(1),
            cache_seqlens=torch.tensor(key_lengths, dtype=torch.int32, device=query.device),
            page_table=_page_table(key_lengths, query.device),
            cu_seqlens_q=_starts(query_lengths, query.device),
            max_seqlen_q=max(query_lengths),
            softmax_scale=scale,
            causal=True,
            num_splits=1,
            return_softmax_lse=True,
        )[:2]
        return out, lse
    out, lse = flash_attn_varlen_func(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        cu_seqlens_q=_starts(query_lengths, query.device),
        cu_seqlens_k=_starts(key_lengths, query.device),
        max_seqlen_q=max(query_lengths),
        max_seqlen_k=max(key_lengths),
        softmax_scale=scale,
        causal=True,
        num_splits=1,
        return_softmax_lse=True,
    )[:2]
    return out, lse


def launch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: list[int],
    key_lengths: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.attention`; returns (out like query, lse [heads, tokens] fp32, natural logarithm).

    On a Hopper GPU (compute capability 9) FA3 runs, and a missing `sgl_kernel` raises ImportError;
    on every other GPU the Triton forward runs. Raises `ValueError` on a dtype or head_dim outside
    both.
    """
    head_dim = query.shape[2]
    require(
        query.dtype == key.dtype == value.dtype == torch.bfloat16,
        f"attention kernel: query {query.dtype}, key {key.dtype}, value {value.dtype} must be "
        "bfloat16 (fp64 gradchecks run on the CPU reference)",
    )
    require(
        0 < head_dim <= _MAX_HEAD_DIM and head_dim % 8 == 0,
        f"attention kernel: head_dim={head_dim} must be a multiple of 8 up to {_MAX_HEAD_DIM}",
    )
    hopper = query.is_cuda and torch.cuda.get_device_capability(query.device)[0] == 9
    launch = launch_flash3 if hopper else launch_triton
    return launch(query, key, value, query_lengths, key_lengths, scale)
