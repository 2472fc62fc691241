"""Sums over leaves and ranks, evaluated literally from the association."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...schema.reduction import Association, rank_association


def evaluate(association: Association, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add the leaves as the nested pairs say; each addition rounds to the leaves' dtype."""
    if isinstance(association, int):
        return leaves[association]
    return evaluate(association[0], leaves) + evaluate(association[1], leaves)


def sum_ranks(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The ranks' parts in the contract's order, in their own dtype."""
    return evaluate(rank_association(len(parts)), parts)
