"""Ulysses context parallelism: exchange a shard of the sequence for a shard of the heads.

Jacobs et al., 2023 (arXiv 2309.14509). Attention then sees whole sequences in their natural order
on fewer heads, with the same op as without context parallelism; per-head attention does not depend
on the number of heads in the call.
"""

from __future__ import annotations

from typing import Any

import torch

from ..function import apply
from ..ops import RankGroup
from ..ops.tree_all_reduce.op import all_to_all


def _to_heads(x: torch.Tensor, natural: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
    tokens, heads, dim = x.shape
    parts = x.view(tokens, ranks.size, heads // ranks.size, dim).transpose(0, 1)
    received = all_to_all(parts.reshape(ranks.size * tokens, -1), ranks)
    return received.view(ranks.size * tokens, heads // ranks.size, dim).index_select(0, natural)


def _to_sequence(
    x: torch.Tensor, natural: torch.Tensor, tokens: int, ranks: RankGroup
) -> torch.Tensor:
    _, heads, dim = x.shape
    slots = x.new_zeros((ranks.size * tokens, heads, dim))
    # `natural` names each slot at most once: a copy, not a sum. Slots of padding stay zero.
    slots[natural] = x
    received = all_to_all(slots.view(ranks.size * tokens, -1), ranks)
    parts = received.view(ranks.size, tokens, heads, dim).transpose(0, 1)
    return parts.reshape(tokens, ranks.size * heads, dim)


class _SequenceToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, natural: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
        ctx.save_for_backward(natural)
        ctx.tokens, ctx.ranks = x.shape[0], ranks
        return _to_heads(x, natural, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (natural,) = ctx.saved_tensors
        return _to_sequence(gradient, natural, ctx.tokens, ctx.ranks), None, None


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, natural: torch.Tensor, tokens: int, ranks: RankGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(natural)
        ctx.ranks = ranks
        return _to_sequence(x, natural, tokens, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (natural,) = ctx.saved_tensors
        return _to_heads(gradient, natural, ctx.ranks), None, None, None


def sequence_to_heads(x: torch.Tensor, natural: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
    """x: [T_local, heads, dim], this rank's tokens -> [T, heads / ranks.size, dim], all real
    tokens in packed order. natural: [T] int64, each token's slot among the ranks' concatenated
    tokens. Heads must be a multiple of the ranks (`replicate_heads` first). Differentiable."""
    return apply(_SequenceToHeads, x, natural, ranks)


def heads_to_sequence(
    x: torch.Tensor, natural: torch.Tensor, tokens: int, ranks: RankGroup
) -> torch.Tensor:
    """The way back: x [T, heads / ranks.size, dim] -> [tokens, heads, dim], where `tokens` is
    T_local; slots of padding are zero. Differentiable."""
    return apply(_HeadsToSequence, x, natural, tokens, ranks)


def replicate_heads(x: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
    """Repeat key or value heads consecutively until every rank can own one.

    x: [tokens, heads, dim] -> [tokens, max(heads, ranks.size), dim]. The copies' gradients are
    summed in fp32; each arrives rounded to x's dtype. Raises `ValueError` where neither number
    divides the other.
    """
    heads = x.shape[1]
    if heads % ranks.size == 0:
        return x
    if ranks.size % heads:
        raise ValueError(
            f"context_parallel_size={ranks.size} and {heads} key/value heads per tensor-parallel "
            "rank: one must divide the other; choose another context_parallel_size"
        )
    return apply(_Replicate, x, ranks.size // heads)


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: int) -> torch.Tensor:
        ctx.times = times
        return x.repeat_interleave(times, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        tokens, heads, dim = gradient.shape
        copies = gradient.view(tokens, heads // ctx.times, ctx.times, dim)
        wide = copies if copies.dtype == torch.float64 else copies.float()
        return wide.sum(2).to(gradient.dtype), None
