"""The token embedding: a row of the table, no arithmetic."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding

from .. import autograd
from ..faults import tap
from ..ops import RankGroup


class PolicyEmbedding(torch.nn.Module):
    """Takes the place of a `VocabParallelEmbedding` and owns its parameter, with its attributes."""

    def __init__(self, stock: VocabParallelEmbedding) -> None:
        super().__init__()
        self.weight = stock.weight
        self.tp_group = stock.tp_group
        self.ranks = RankGroup.of(stock.tp_group)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: [1, T] int64 -> [1, T, hidden] fp32, the bf16 rows unchanged."""
        rows = autograd.embedding(tokens.view(-1), self.weight, ranks=self.ranks)
        return tap(None, "embedding", rows).unsqueeze(0)
