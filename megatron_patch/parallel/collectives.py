"""Gathering the last dimension over ranks, and rows summed over ranks that each rank keeps."""

from __future__ import annotations

from typing import Any

import torch

from ..function import apply
from ..ops import RankGroup, gather_ranks, tree_all_reduce, tree_reduce_scatter
from ..ops.formats import accumulator_dtype


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


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ranks: RankGroup, out_dtype: torch.dtype | None
    ) -> torch.Tensor:
        ctx.rows, ctx.dtype, ctx.ranks = x.shape[0], x.dtype, ranks
        return tree_reduce_scatter(x, ranks, out_dtype=out_dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        # Every rank's message enters every row with weight one: the owners' gradients, side by
        # side. Rows that were missing had no message.
        whole = torch.cat(gather_ranks(gradient, ctx.ranks))[: ctx.rows]
        return whole.to(ctx.dtype), None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: int, ranks: RankGroup) -> torch.Tensor:
        ctx.ranks = ranks
        return torch.cat(gather_ranks(x, ranks))[:rows]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        wide = gradient.to(accumulator_dtype(gradient.dtype))
        mine = tree_reduce_scatter(wide, ctx.ranks)
        return mine.to(gradient.dtype), None, None


def reduce_scatter_rows(
    x: torch.Tensor, ranks: RankGroup, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`ops.tree_reduce_scatter` with a gradient, for sequence parallelism: x [rows, N], every
    rank's partial sum -> [ceil(rows / size), N], this rank's rows of the sum, zeros after the last.
    Backward gathers the owners' gradients and gives every rank all of them."""
    return apply(_ReduceScatterRows, x, ranks, out_dtype)


def gather_rows(x: torch.Tensor, rows: int, ranks: RankGroup) -> torch.Tensor:
    """The way back: every rank's [ceil(rows / size), N], side by side, without the rows that are
    missing at the end -> [rows, N]. For ranks that each use all rows for a part of the work:
    backward sums the ranks' gradients in fp32, as a tree, and hands each rank its own rows."""
    return apply(_GatherRows, x, rows, ranks)
