"""Sums over leaves and ranks, evaluated literally from the association."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...schema.reduction import Association, rank_association
from ..formats import require


def evaluate(association: Association, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add the leaves as the nested pairs say; each addition rounds to the leaves' dtype."""
    if isinstance(association, int):
        return leaves[association]
    return evaluate(association[0], leaves) + evaluate(association[1], leaves)


def sum_ranks(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The ranks' parts in the contract's order, in their own dtype."""
    return evaluate(rank_association(len(parts)), parts)


def check_ranks(size: int, bias_ranks: int) -> None:
    """`ValueError` for a number of ranks without a tree, or a bias that no node of it takes."""
    rank_association(size)
    require(
        1 <= bias_ranks <= size and size % bias_ranks == 0,
        f"tree_all_reduce: the bias enters at the first of {bias_ranks} parts, over {size} ranks",
    )


def combine(
    parts: Sequence[torch.Tensor], bias: torch.Tensor | None, bias_ranks: int
) -> torch.Tensor:
    """Add the ranks' parts; the bias enters at the node that covers the first of `bias_ranks`
    equal parts. `bias_ranks` at most the number of parts (finer: see `row_linear.op`)."""

    def walk(node: Association, ranks: int, first: bool) -> torch.Tensor:
        value = (
            parts[node]
            if isinstance(node, int)
            else walk(node[0], ranks // 2, first) + walk(node[1], ranks // 2, False)
        )
        if bias is not None and first and ranks * bias_ranks == len(parts):
            value = value + bias.to(value.dtype)
        return value

    return walk(rank_association(len(parts)), len(parts), True)
