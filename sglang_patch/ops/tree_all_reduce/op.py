"""Sums over the ranks of a process group: the transport carries, only we add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..formats import require
from . import reference


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A tensor-parallel group: its size, this process's rank in it, its torch process group."""

    size: int = 1
    rank: int = 0
    group: Any = None

    def __post_init__(self) -> None:
        require(
            self.size == 1 or self.group is not None,
            f"RankGroup: size={self.size} needs a torch process group",
        )

    @classmethod
    def of(cls, group: Any) -> RankGroup:
        """From a torch process group (None: a group of one)."""
        if group is None:
            return cls()
        return cls(dist.get_world_size(group), dist.get_rank(group), group)


def gather_ranks(x: torch.Tensor, ranks: RankGroup) -> list[torch.Tensor]:
    """Every rank's `x` (equal shapes), in rank order; no arithmetic on the way."""
    if ranks.size == 1:
        return [x]
    x = x.contiguous()
    gathered = x.new_empty((ranks.size, *x.shape))
    if x.device.type == "cpu":
        # gloo has no all_gather_into_tensor for bf16 in every release; a list works for all dtypes
        dist.all_gather(list(gathered.unbind(0)), x, group=ranks.group)
    else:
        dist.all_gather_into_tensor(gathered, x, group=ranks.group)
    return list(gathered.unbind(0))


def tree_all_reduce(x: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
    """Sum of `x` over the ranks by the balanced tree of the schema, in x's dtype, on every rank.

    Power-of-two world sizes up to 8; others raise `ValueError`.
    """
    return reference.sum_ranks(gather_ranks(x, ranks))
