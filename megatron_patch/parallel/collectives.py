"""Gathering the last dimension over ranks, and an all-to-all that moves bytes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..function import apply
from ..ops import RankGroup, gather_ranks, tree_all_reduce
from ..ops.formats import accumulator_dtype


def all_to_all(x: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
    """Chunk i of the first dimension goes to rank i; returns the chunks received, in rank order.

    x: [ranks.size * n, ...], any dtype; no arithmetic.
    """
    if ranks.size == 1:
        return x
    assert x.shape[0] % ranks.size == 0, (tuple(x.shape), ranks.size)
    x = x.contiguous()
    received = torch.empty_like(x)
    # As bytes: gloo does not carry bf16 here in every release.
    sent = x.view(-1).view(torch.uint8)
    dist.all_to_all_single(received.view(-1).view(torch.uint8), sent, group=ranks.group)
    return received


def _own(x: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
    return x.chunk(ranks.size, dim=-1)[ranks.rank].contiguous()


class _GatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
        ctx.ranks = ranks
        return torch.cat(gather_ranks(x, ranks), dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _own(gradient, ctx.ranks), None


class _GatherPartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
        ctx.ranks = ranks
        return torch.cat(gather_ranks(x, ranks), dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        total = tree_all_reduce(gradient.to(accumulator_dtype(gradient.dtype)), ctx.ranks)
        return _own(total, ctx.ranks).to(gradient.dtype), None


def gather_replicated(x: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
    """Concatenate every rank's [..., n] along the last dimension, for a loss that every rank
    computes in full: backward hands each rank its own slice. A sum over ranks would multiply the
    gradient by their number."""
    return apply(_GatherReplicated, x, ranks)


def gather_partial(x: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
    """Concatenate every rank's [..., n] along the last dimension, for ranks that each use a part:
    backward sums the ranks' gradients in fp32, as a tree, and hands each rank its own slice."""
    return apply(_GatherPartial, x, ranks)
