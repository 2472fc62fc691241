"""`qk_norm_rope`: checks, dispatch and shape inference."""

from __future__ import annotations

import torch

from ..formats import NAMESPACE, accumulator_dtype, eager_on_gpu, require, rounded_dtype
from . import reference


@torch.library.custom_op(f"{NAMESPACE}::qk_norm_rope", mutates_args=(), device_types="cpu")
def _qk_norm_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key = reference.qk_norm_rope(query, key, query_weight, key_weight, eps, positions, table)
    return query.contiguous(), key.contiguous()


@_qk_norm_rope.register_kernel("cuda")
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    from .kernel import launch_qk_norm_rope

    return launch_qk_norm_rope(query, key, query_weight, key_weight, eps, positions, table)


@_qk_norm_rope.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    narrow = rounded_dtype(query.dtype, "bfloat16")
    heads = (query.shape[0], query.shape[1:-1].numel(), query.shape[-1])
    return query.new_empty(heads, dtype=narrow), key.new_empty(key.shape, dtype=narrow)


def qk_norm_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of every head, then `rope`: the bits of the two ops in one launch.

    query: [tokens, heads, head_dim], or [tokens, groups, heads of a group, head_dim] where groups
    of heads lie apart; key: [tokens, kv_heads, head_dim]; both bf16 and best given as views of the
    fused projection, of any strides. query_weight, key_weight: [head_dim], used in fp32;
    positions: [tokens] int; table: [max_position, head_dim] fp32 from `rope_table`. Returns dense
    (query [tokens, heads, head_dim], key) in bf16; fp64 stays fp64. Raises `ValueError` on a table
    that was cast, or dtypes and shapes that do not fit.
    """
    dim = query.shape[-1]
    require(
        query.dim() in (3, 4) and key.dim() == 3 and query.shape[0] == key.shape[0],
        f"qk_norm_rope: query {tuple(query.shape)} and key {tuple(key.shape)} must be [tokens, "
        "(groups,) heads, head_dim] with equal tokens",
    )
    require(
        dim % 2 == 0 and key.shape[-1:] == query_weight.shape == key_weight.shape == (dim,),
        f"qk_norm_rope: heads of {dim} and {key.shape[-1]} with weights "
        f"{tuple(query_weight.shape)} and {tuple(key_weight.shape)}: one even head_dim is needed",
    )
    require(
        query.dtype == key.dtype and query.dtype in (torch.bfloat16, torch.float64),
        f"qk_norm_rope: query {query.dtype} and key {key.dtype}; the contract takes bfloat16",
    )
    require(
        table.dtype == accumulator_dtype(query.dtype) and table.shape[-1] == dim,
        f"qk_norm_rope: table {table.dtype} {tuple(table.shape)} must be "
        f"{accumulator_dtype(query.dtype)} [max_position, {dim}]",
    )
    require(
        positions.shape == query.shape[:1],
        f"qk_norm_rope: positions {tuple(positions.shape)} must be [{query.shape[0]}]",
    )
    if eager_on_gpu(query):
        from .kernel import launch_qk_norm_rope

        return launch_qk_norm_rope(query, key, query_weight, key_weight, eps, positions, table)
    return _qk_norm_rope(query, key, query_weight, key_weight, eps, positions, table)
