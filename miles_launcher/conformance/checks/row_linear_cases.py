"""The sums on which `row_linear` is judged, and the oracle's answer to each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..bits import exact_leaves, random, small_integers
from ..context import Context, array
from ..oracle import products
from ..oracle.numbers import Array, bf16
from ..subject import RowReduction, row_reduction

V1 = "qwen3_dense_true_on_policy_v1"
V2 = "qwen3_dense_true_on_policy_v2"
COLUMNS = 7


@dataclass(frozen=True, slots=True)
class Case:
    """One sum: K of all ranks, the rollout's degree (v1) or the segments (v2)."""

    contract: str
    k_size: int
    rollout_tp: int = 1
    segments: int = 8

    def reduction(self) -> RowReduction:
        return row_reduction(
            self.contract, self.k_size, rollout_tp=self.rollout_tp, segments=self.segments
        )

    def leaf_count(self) -> int:
        """Leaves of the whole K, worked out here."""
        if self.contract == V2:
            return self.segments
        width = self.k_size // self.rollout_tp
        return self.k_size // products.TILE if width % products.TILE == 0 else self.rollout_tp

    def total(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Array:
        """The whole sum in the format of the leaves."""
        operands = (array(x), array(weight), None if bias is None else array(bias))
        if self.contract == V1:
            return products.row_linear_v1(*operands, self.rollout_tp)
        return products.row_linear_v2(*operands, self.segments)

    def oracle(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Array:
        """What the op returns: the sum rounded to bf16."""
        return bf16(self.total(x, weight, bias))

    def other_orders(self, x: torch.Tensor, weight: torch.Tensor) -> list[Array]:
        """The same leaves added otherwise, where another order exists: left to right, and for v1
        as a plain tree."""
        parts = products.leaves(array(x), array(weight), self.leaf_count())
        if self.contract == V2:
            return [bf16(products.chain(parts, "float32"))] if self.segments > 2 else []
        parts, first = [bf16(p) for p in parts], products.first_of(len(parts))
        if self.rollout_tp > 1:
            return [products.chain(parts, "bfloat16")] if len(parts) > 3 else []
        chained = [products.chain(parts, "bfloat16")] if first < len(parts) and first > 1 else []
        plain = first > 3 or (first == 3 and len(parts) > 3)
        return chained * (len(parts) > 2) + [products.plain_tree(parts, "bfloat16")] * plain

    def label(self) -> str:
        by = f"rollout tp {self.rollout_tp}" if self.contract == V1 else f"S {self.segments}"
        return f"K {self.k_size}, {by}"

    def __str__(self) -> str:
        return self.label()


def cases(ctx: Context, contract: str) -> list[Case]:
    """v1: every number of tiles, and K that is no multiple of a tile a rank. v2: every S, K whole
    and odd."""
    if contract == V1:
        tiles = [Case(V1, t * products.TILE) for t in ctx.setting.tiles]
        return [*tiles, Case(V1, 2 * 1216, 2), Case(V1, 4 * 448, 4), Case(V1, 192, 1)]
    return [
        Case(V2, k, segments=s) for k in (*ctx.setting.row_k_sizes, 8 * 76) for s in (1, 2, 4, 8)
    ]


def random_operands(case: Case, rows: int) -> list[torch.Tensor]:
    """x, weight and bias whose every product and sum rounds: for claims that need no oracle, since
    they compare the op with itself at another place, size or degree."""
    numbers = random(rows, case.k_size, seed=24), random(COLUMNS, case.k_size, seed=25)
    return [*numbers, random(COLUMNS, seed=23)]


def operands(ctx: Context, case: Case, rows: int) -> list[torch.Tensor]:
    """x, weight and bias for which the order shows in the op's bf16 result.

    Random numbers where a product's inside is the written order, and otherwise leaves that are
    exact, so that only the order of the leaves decides. Under v2 the result has sixteen bits fewer
    than the sums, so of every four segments the third is the first's negative, both large: what is
    left is as small as their roundings, which are another order's other numbers.
    """
    if ctx.exact_products:
        x, weight = random(rows, case.k_size, seed=21), random(COLUMNS, case.k_size, seed=22)
    else:
        x = exact_leaves(rows, case.k_size, case.leaf_count(), seed=21)
        weight = small_integers(COLUMNS, case.k_size, seed=22)
    if case.contract == V2:
        width = case.k_size // case.segments
        for first in range(0, case.segments - 2, 4):
            one, other = (slice(i * width, (i + 1) * width) for i in (first, first + 2))
            x[:, one] *= 2.0**17
            x[:, other] = -x[:, one]
            weight[:, other] = weight[:, one]
    return [x, weight, random(COLUMNS, seed=23, scale=8.0)]


def whole(ctx: Context, case: Case, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """The public op on one rank; moves its arguments."""
    out: torch.Tensor = ctx.subject.row_linear(*ctx.put(x, *rest), reduction=case.reduction())
    return out


def sharded(
    ctx: Context, case: Case, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tp: int
) -> torch.Tensor:
    """`tp` ranks one after another: each its subtree, then the parts combined, in the format of
    the leaves. The bias only where no rank holds it inside (v1 with more rollout ranks than ours
    is for real ranks)."""
    reduction = case.reduction()
    shards = zip(x.chunk(tp, 1), weight.chunk(tp, 1), strict=True)
    parts = [ctx.subject.row_linear_partial(*ctx.put(a, w), reduction, tp) for a, w in shards]
    (moved,) = ctx.put(bias)
    out: torch.Tensor = ctx.subject.combine_partials(parts, moved, reduction)
    return out


def degrees(ctx: Context, case: Case) -> list[int]:
    """The degrees at which each rank has whole leaves, worked out here."""
    fit = []
    for tp in ctx.setting.tp:
        each, left = divmod(case.leaf_count(), tp)
        # A rank holds a whole subtree: whole runs, or one leaf of a pair.
        run = products.first_of(case.leaf_count()) if case.contract == V1 else 1
        if not left and (each % run == 0 or run == 2):
            fit.append(tp)
    return fit
