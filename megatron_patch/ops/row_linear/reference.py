"""A row-parallel linear evaluated literally from the schema's description, on one rank or all."""

from __future__ import annotations

import torch

from ...schema.reduction import Association, RowReduction, run_tree
from ..formats import rounded_dtype
from ..linear.reference import leaf_products
from ..tree_all_reduce.reference import evaluate


def partial(
    x: torch.Tensor, weight: torch.Tensor, num_leaves: int, run: int, leaf_dtype: torch.dtype
) -> torch.Tensor:
    """One rank's subtree: x [M, K_local], weight [N, K_local] -> [M, N] in `leaf_dtype`."""
    leaves = leaf_products(x, weight, num_leaves).to(leaf_dtype)
    return evaluate(run_tree(num_leaves, run), list(leaves.unbind(0)))


def row_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, reduction: RowReduction
) -> torch.Tensor:
    """The whole product on one process, straight from the leaves of the global K: the oracle.

    x: [M, K], weight: [N, K] -> [M, N] bf16. Shares no code with the sharded path but the leaf.
    """
    leaf_dtype = rounded_dtype(x.dtype, reduction.leaf_dtype)
    leaves = leaf_products(x, weight, reduction.num_leaves).to(leaf_dtype)

    def walk(node: Association, depth: int) -> torch.Tensor:
        value = (
            leaves[node] if isinstance(node, int) else walk(node[0], depth - 1) + walk(node[1], -1)
        )
        if bias is not None and depth == 0:
            value = value + bias.to(leaf_dtype)
        return value

    total = walk(reduction.association, reduction.bias_depth())
    return total.to(rounded_dtype(x.dtype, "bfloat16"))
