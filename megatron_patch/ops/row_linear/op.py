"""`row_linear`: a linear whose K the ranks share, with the association of the schema."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from ...schema.reduction import RowReduction, local_association, run_of
from ..formats import DTYPES, NAMESPACE, eager_on_gpu, require
from ..linear.op import check_operands
from ..tree_all_reduce.op import RankGroup, combine, stage, tree_all_reduce
from . import reference


@torch.library.custom_op(f"{NAMESPACE}::row_linear_partial", mutates_args=(), device_types="cpu")
def _row_linear_partial(
    x: torch.Tensor, weight: torch.Tensor, num_leaves: int, run: int, leaf_dtype: str
) -> torch.Tensor:
    return reference.partial(x, weight, num_leaves, run, DTYPES[leaf_dtype])


@_row_linear_partial.register_kernel("cuda")
def _(
    x: torch.Tensor, weight: torch.Tensor, num_leaves: int, run: int, leaf_dtype: str
) -> torch.Tensor:
    from .kernel import launch_row_linear_partial

    return launch_row_linear_partial(x, weight, num_leaves, run, DTYPES[leaf_dtype])


@_row_linear_partial.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, num_leaves: int, run: int, leaf_dtype: str
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=DTYPES[leaf_dtype])


@torch.library.custom_op(f"{NAMESPACE}::row_linear_whole", mutates_args=(), device_types="cpu")
def _row_linear_whole(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_leaves: int,
    run: int,
    leaf_dtype: str,
    out_dtype: str,
) -> torch.Tensor:
    total = reference.partial(x, weight, num_leaves, run, DTYPES[leaf_dtype])
    return total.to(DTYPES[out_dtype])


@_row_linear_whole.register_kernel("cuda")
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_leaves: int,
    run: int,
    leaf_dtype: str,
    out_dtype: str,
) -> torch.Tensor:
    from .kernel import launch_row_linear_partial

    leaf, out = DTYPES[leaf_dtype], DTYPES[out_dtype]
    return launch_row_linear_partial(x, weight, num_leaves, run, leaf, out_dtype=out)


@_row_linear_whole.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_leaves: int,
    run: int,
    leaf_dtype: str,
    out_dtype: str,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=DTYPES[out_dtype])


def row_linear_partial(
    x: torch.Tensor,
    weight: torch.Tensor,
    reduction: RowReduction,
    tensor_parallel_size: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One rank's subtree of the sum: x [M, K_local] bf16, weight [N, K_local] bf16.

    Returns [M, N] in the contract's leaf dtype, in `out` (contiguous) where it is given. Raises
    `ValueError` where K_local is not this rank's share of `reduction.k_global`, or where the share
    would cut a leaf.
    """
    leaves, run, name = _share(x, weight, reduction, tensor_parallel_size)
    if eager_on_gpu(x):
        from .kernel import launch_row_linear_partial

        return launch_row_linear_partial(x, weight, leaves, run, DTYPES[name], out=out)
    total = _row_linear_partial(x, weight, leaves, run, name)
    return total if out is None else out.copy_(total)


def _share(
    x: torch.Tensor, weight: torch.Tensor, reduction: RowReduction, tensor_parallel_size: int
) -> tuple[int, int, str]:
    """(leaves, run, leaf dtype) of one rank's subtree, its operands checked."""
    check_operands("row_linear", x, weight)
    require(
        x.shape[-1] * tensor_parallel_size == reduction.k_global,
        f"row_linear: K_local={x.shape[-1]} at tensor_parallel_size={tensor_parallel_size} is not "
        f"a share of K={reduction.k_global}",
    )
    name = "float64" if x.dtype == torch.float64 else reduction.leaf_dtype
    return *_subtree(reduction, tensor_parallel_size), name


@lru_cache(maxsize=256)
def _subtree(reduction: RowReduction, tensor_parallel_size: int) -> tuple[int, int]:
    """(leaves, run) of a rank's subtree; remembered, for every call of a layer asks."""
    node = local_association(reduction, tensor_parallel_size)
    return reduction.leaves_per_rank(tensor_parallel_size), run_of(node)


def combine_partials(
    parts: Sequence[torch.Tensor], bias: torch.Tensor | None, reduction: RowReduction
) -> torch.Tensor:
    """Finish the tree over the ranks' parts, with the bias where the contract puts it, in the
    leaf dtype. parts: one [M, N] a rank, in rank order."""
    return combine(parts, bias, reduction.bias_ranks)


def _biased_local(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    reduction: RowReduction,
    ranks: RankGroup,
) -> torch.Tensor:
    """The first rank's subtree when the bias enters inside it (more rollout ranks than ours)."""
    pieces = reduction.bias_ranks // ranks.size
    width = x.shape[-1] // pieces
    parts = [
        row_linear_partial(
            x[:, i * width : (i + 1) * width],
            weight[:, i * width : (i + 1) * width],
            reduction,
            reduction.bias_ranks,
        )
        for i in range(pieces)
    ]
    return combine(parts, bias, pieces)


def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    reduction: RowReduction,
    ranks: RankGroup = RankGroup(),
) -> torch.Tensor:
    """`x @ weight.T + bias`, K shared by the ranks, added in the contract's order on every rank.

    x: [..., K_local] bf16; weight: [N, K_local] bf16; bias: [N] or None, the same on every rank.
    Returns [..., N] bf16, the same bits for every tensor-parallel size that the reduction admits.
    Raises `ValueError` where the shard would cut a leaf; never takes another path.
    """
    flat = x.reshape(-1, x.shape[-1])
    rounded = "float64" if x.dtype == torch.float64 else "bfloat16"
    if ranks.size == 1 and bias is None:
        # The root of the tree is here: the kernel rounds it.
        leaves, run, name = _share(flat, weight, reduction, 1)
        if eager_on_gpu(flat):
            from .kernel import launch_row_linear_partial

            leaf, out_dtype = DTYPES[name], DTYPES[rounded]
            whole = launch_row_linear_partial(flat, weight, leaves, run, leaf, out_dtype=out_dtype)
        else:
            whole = _row_linear_whole(flat, weight, leaves, run, name, rounded)
        return whole.view(*x.shape[:-1], weight.shape[0])
    inside = bias is not None and reduction.bias_ranks > ranks.size
    if inside and ranks.rank == 0:
        assert bias is not None
        mine = _biased_local(flat, weight, bias, reduction, ranks)
    else:
        shape = (flat.shape[0], weight.shape[0])
        staged = stage(*shape, DTYPES[reduction.leaf_dtype], ranks)
        mine = row_linear_partial(flat, weight, reduction, ranks.size, out=staged)
    out = tree_all_reduce(
        mine,
        ranks,
        bias=None if inside else bias,
        bias_ranks=reduction.bias_ranks,
        out_dtype=DTYPES[rounded],
    )
    return out.view(*x.shape[:-1], weight.shape[0])
