"""Causal attention over packed sequences.

On a GPU the forward is FlashAttention 3 or the Triton path, and the backward PyTorch's
FlashAttention, fed with the forward's output and log-sum-exp; on a CPU the backward recomputes the
probabilities (Dao et al., 2022, arXiv 2205.14135, algorithm 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import ops
from ..function import apply
from ..ops.formats import accumulator_dtype
from .products import op_calls


def reference_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    out_gradient: torch.Tensor,
    lengths: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, one sequence at a time; shapes as in `ops.attention`."""
    wide = accumulator_dtype(query.dtype)
    kv_heads, head_dim = key.shape[1:]
    group = query.shape[1] // kv_heads
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    start = 0
    for length in lengths:
        span = slice(start, start + length)
        start += length
        # [kv_heads, group * length, head_dim]: the queries of one key head side by side.
        q, o, do = (
            x[span].to(wide).view(length, kv_heads, group, head_dim).permute(1, 2, 0, 3)
            for x in (query, out, out_gradient)
        )
        q, o, do = (x.reshape(kv_heads, group * length, head_dim) for x in (q, o, do))
        k, v = (x[span].to(wide).transpose(0, 1) for x in (key, value))
        hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = (q @ k.transpose(1, 2)) * scale
        scores = scores.masked_fill(hidden.repeat(group, 1), float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        correction = (do * o).sum(-1, keepdim=True)
        dscores = weights * (do @ v.transpose(1, 2) - correction) * scale
        dq = (dscores @ k).view(kv_heads, group, length, head_dim).permute(2, 0, 1, 3)
        parts.append(
            (
                dq.reshape(length, kv_heads * group, head_dim),
                (dscores.transpose(1, 2) @ q).transpose(0, 1),
                (weights.transpose(1, 2) @ do).transpose(0, 1),
            )
        )
    dquery, dkey, dvalue = (torch.cat(x).to(query.dtype) for x in zip(*parts, strict=True))
    return dquery, dkey, dvalue


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """PyTorch's deterministic mode, without `warn_only`, for the operators inside.

    FlashAttention's backward adds dq with atomics unless this mode is on; with `warn_only` it warns
    once and still does (aten `_flash_attention_backward`, PyTorch 2.11).
    """
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def flash_backward(
    out_gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value on a GPU, the same bits on every call; shapes as in
    `launch_attention`. starts: [sequences + 1] int32; longest: the most tokens of a sequence."""
    # No dropout, so the philox state is never read; the operator still wants two tensors.
    no_rng = torch.zeros(2, dtype=torch.uint64, device=query.device)
    with deterministic_algorithms():
        dquery, dkey, dvalue, *_ = torch.ops.aten._flash_attention_backward(
            out_gradient.contiguous(),
            query,
            key,
            value,
            out,
            lse,
            starts,
            starts,
            longest,
            longest,
            0.0,
            True,
            no_rng,
            no_rng.new_empty(0),
            scale=scale,
        )
    return dquery, dkey, dvalue


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: list[int],
        scale: float,
        path: str | None,
    ) -> torch.Tensor:
        op_calls["attention"] += 1
        ctx.lengths, ctx.scale = lengths, scale
        if query.device.type == "cpu":
            out = ops.attention(query, key, value, query_lengths=lengths, scale=scale, path=path)
            ctx.save_for_backward(query, key, value, out)
            return out
        from ..ops.attention.kernel import launch_attention

        # The op returns the output alone; its launcher also hands out the log-sum-exp.
        out, lse = launch_attention(query, key, value, lengths, lengths, scale, path)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, out_gradient: torch.Tensor) -> tuple[Any, ...]:
        if out_gradient.device.type == "cpu":
            query, key, value, out = ctx.saved_tensors
            gradients = reference_backward(
                query, key, value, out, out_gradient, ctx.lengths, ctx.scale
            )
        else:
            from ..ops.attention.kernel import sequence_starts

            query, key, value, out, lse = ctx.saved_tensors
            gradients = flash_backward(
                out_gradient,
                query,
                key,
                value,
                out,
                lse,
                sequence_starts(ctx.lengths, query.device),
                max(ctx.lengths),
                ctx.scale,
            )
        return (*gradients, None, None, None)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    lengths: list[int],
    scale: float,
    path: str | None = None,
) -> torch.Tensor:
    """`ops.attention` over whole sequences, with a gradient. query: [tokens, heads, head_dim];
    key, value: [tokens, kv_heads, head_dim]; lengths: tokens per sequence, in packed order; path:
    as in `ops.attention`. The gradients have the same bits on every call."""
    return apply(_Attention, query, key, value, lengths, scale, path)
