"""`rope` and its table: checks, dispatch and shape inference."""

from __future__ import annotations

import torch

from ..formats import NAMESPACE, accumulator_dtype, eager_on_gpu, require
from . import reference


def rope_table(head_dim: int, max_position: int, base: float) -> torch.Tensor:
    """The cos/sin table [max_position, head_dim] fp32, cosines first, on the CPU.

    Frequencies and angles are fp32, as every checkpoint of the family was trained; the cosines of
    those angles are taken in fp64 and rounded once, so that the table does not depend on a
    processor's fp32 vector library. Both sides make it here and move it; nobody casts it.
    """
    require(head_dim % 2 == 0, f"rope_table: head_dim={head_dim} must be even")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / (base**exponents)
    positions = torch.arange(max_position, dtype=torch.float32, device="cpu")
    angles = (positions[:, None] * frequencies[None, :]).double()
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


@torch.library.custom_op(f"{NAMESPACE}::rope", mutates_args=(), device_types="cpu")
def _rope(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.rope(query, key, positions, table)


@_rope.register_kernel("cuda")
def _(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    from .kernel import launch_rope

    return launch_rope(query, key, positions, table)


@_rope.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


def rope(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key by their positions.

    query: [tokens, heads, head_dim]; key: [tokens, kv_heads, head_dim]; positions: [tokens] int;
    table: [max_position, head_dim] fp32 from `rope_table`. Returns new tensors in the input dtype:
    multiply-add in fp32, each step rounded, then one rounding. Raises `ValueError` on a table that
    was cast, or shapes that do not fit.
    """
    require(
        query.dim() == 3 and key.dim() == 3 and query.shape[::2] == key.shape[::2],
        f"rope: query {tuple(query.shape)} and key {tuple(key.shape)} must be "
        "[tokens, heads, head_dim] with equal tokens and head_dim",
    )
    require(
        table.dtype == accumulator_dtype(query.dtype) and table.shape[-1] == query.shape[-1],
        f"rope: table {table.dtype} {tuple(table.shape)} must be "
        f"{accumulator_dtype(query.dtype)} [max_position, {query.shape[-1]}]",
    )
    require(
        positions.shape == query.shape[:1],
        f"rope: positions {tuple(positions.shape)} must be [{query.shape[0]}]",
    )
    if eager_on_gpu(query):
        from .kernel import launch_rope

        return launch_rope(query, key, positions, table)
    return _rope(query, key, positions, table)
