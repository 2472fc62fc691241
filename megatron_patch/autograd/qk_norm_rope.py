"""Head norms and rotation of a fused projection: from its rows to query, key and value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .. import ops
from ..function import apply
from .products import op_calls, parameter_gradient
from .rms_norm import gradients
from .rope import rotate_back


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """Where a rank's heads stand in a row of megatron's fused projection: `groups` times
    `per_group` query heads, a key head and a value head of `dim` elements. Of every group's query
    heads `owned` are the rank's, from `first` on (all, unless ranks share a key head)."""

    groups: int
    per_group: int
    dim: int
    first: int
    owned: int

    def split(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of mixed [tokens, width]: query [tokens, groups, owned, dim], key and value
        [tokens, groups, dim]."""
        grouped = mixed.view(mixed.shape[0], self.groups, self.per_group + 2, self.dim)
        query = grouped[:, :, self.first : self.first + self.owned]
        return query, grouped[:, :, self.per_group], grouped[:, :, self.per_group + 1]


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        eps: float,
        positions: torch.Tensor,
        table: torch.Tensor,
        layout: HeadLayout,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        op_calls["qk_norm_rope"] += 1
        ctx.save_for_backward(mixed, query_weight, key_weight, positions, table)
        ctx.eps, ctx.layout = eps, layout
        query, key, value = layout.split(mixed)
        return (
            *ops.qk_norm_rope(query, key, query_weight, key_weight, eps, positions, table),
            value,
        )

    @staticmethod
    def backward(
        ctx: Any, dquery: torch.Tensor, dkey: torch.Tensor, dvalue: torch.Tensor
    ) -> tuple[Any, ...]:
        mixed, query_weight, key_weight, positions, table = ctx.saved_tensors
        layout: HeadLayout = ctx.layout
        # Heads that other ranks own have no gradient here.
        make = torch.empty if layout.owned == layout.per_group else torch.zeros
        gradient = make(mixed.shape, dtype=mixed.dtype, device=mixed.device)
        query, key, _ = layout.split(mixed)
        places = layout.split(gradient)
        if mixed.is_cuda:
            from .kernels.columns import add_column_sums
            from .kernels.qk_norm_rope import launch_qk_norm_rope_backward

            of_query, of_key = launch_qk_norm_rope_backward(
                (query, key), (query_weight, key_weight), ctx.eps, positions, table,
                (dquery, dkey, dvalue), places,
            )  # fmt: skip
            add_query = lambda target: add_column_sums(of_query, target)  # noqa: E731
            add_key = lambda target: add_column_sums(of_key, target)  # noqa: E731
        else:
            cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
            query_rows, key_rows = (
                _into(place, x, weight, ctx.eps, rotate_back(dy, cos, sin))
                for place, x, weight, dy in (
                    (places[0], query, query_weight, dquery),
                    (places[1], key, key_weight, dkey),
                )
            )
            places[2].copy_(dvalue)
            add_query = lambda target: target.add_(query_rows.sum(0))  # noqa: E731
            add_key = lambda target: target.add_(key_rows.sum(0))  # noqa: E731
        dq, dk = (
            parameter_gradient(weight, add) if wanted else None
            for weight, add, wanted in (
                (query_weight, add_query, ctx.needs_input_grad[1]),
                (key_weight, add_key, ctx.needs_input_grad[2]),
            )
        )
        return gradient, dq, dk, None, None, None, None


def _into(
    place: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, dy: torch.Tensor
) -> torch.Tensor:
    """Writes the norm's gradient into `place`; returns the weight's by head, [heads, dim]."""
    ds, by_row = gradients(x.flatten(1, -2), weight, eps, dy)
    place.copy_(ds.view(place.shape))
    return by_row.reshape(-1, weight.shape[0])


def qk_norm_rope(
    mixed: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    table: torch.Tensor,
    layout: HeadLayout,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`ops.qk_norm_rope` on the rows of a fused projection, with a gradient.

    mixed: [tokens, width] bf16 as `layout` says; query_weight, key_weight: [dim]; positions:
    [tokens] int; table: [max_position, dim] fp32. Returns (query [tokens, groups * owned, dim],
    key [tokens, groups, dim], both dense; value [tokens, groups, dim], a view of `mixed`). In
    backward the three gradients meet in one tensor of `mixed`'s layout.
    """
    return apply(_QKNormRope, mixed, query_weight, key_weight, eps, positions, table, layout)
