"""Rotary position embedding from the one fp32 table."""

from __future__ import annotations

import torch

from .. import autograd
from ..config import RopeTable


class PolicyRope:
    """Not a module: it owns nothing that a cast or a checkpoint should reach."""

    def __init__(self, table: RopeTable) -> None:
        self.table = table

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query: [tokens, heads, head_dim]; key: [tokens, kv_heads, head_dim]; positions:
        [tokens] int64. Returns both rotated, bf16."""
        return autograd.rope(query, key, positions, self.table.on(query.device))
