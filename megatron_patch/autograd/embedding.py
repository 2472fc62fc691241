"""A token's row of a table whose rows tensor parallelism cuts."""

from __future__ import annotations

from typing import Any

import torch

from ..faults import flip
from ..function import apply
from ..ops import RankGroup, gather_ranks
from ..ops.formats import accumulator_dtype
from .products import op_calls, parameter_gradient


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, ranks: RankGroup
    ) -> torch.Tensor:
        op_calls["embedding"] += 1
        per_rank = weight.shape[0]
        first = ranks.rank * per_rank
        owned = (tokens >= first) & (tokens < first + per_rank)
        rows = weight[(tokens - first).clamp(0, per_rank - 1)]
        if ranks.size > 1:
            # Selected, not summed: a row is copied from its owner, bit for bit.
            parts = torch.stack(gather_ranks(rows, ranks))
            where = tokens.div(per_rank, rounding_mode="floor")
            rows = parts[where, torch.arange(tokens.shape[0], device=tokens.device)]
        ctx.save_for_backward(tokens, weight, owned)
        ctx.first = first
        return flip(None, "embedding", rows).to(accumulator_dtype(weight.dtype))

    @staticmethod
    def backward(ctx: Any, out_gradient: torch.Tensor) -> tuple[Any, ...]:
        tokens, weight, owned = ctx.saved_tensors
        index = tokens[owned] - ctx.first
        rows = out_gradient[owned]

        def add(target: torch.Tensor) -> None:
            if target.device.type == "cpu":
                target.index_add_(0, index, rows)
            else:
                # index_add_ is atomic on a GPU; an accumulating index_put_ sorts: repeatable.
                target.index_put_((index,), rows, accumulate=True)

        return None, parameter_gradient(weight, add), None


def embedding(
    tokens: torch.Tensor, weight: torch.Tensor, *, ranks: RankGroup = RankGroup()
) -> torch.Tensor:
    """Rows of the table. tokens: [T] int64, global ids; weight: [rows_local, hidden] bf16, this
    rank's equal share of the padded table. Returns [T, hidden] fp32, the bf16 rows unchanged: the
    start of the residual stream, whose gradient therefore stays fp32."""
    return apply(_Embedding, tokens, weight, ranks)
