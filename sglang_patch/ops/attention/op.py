"""`attention`: checks, dispatch and shape inference."""

from __future__ import annotations

import torch

from ..formats import NAMESPACE, require
from . import reference

# FA3's decode has the bits of its prefill for heads of this width alone (docs/parity.md).
FLASH3_HEAD_DIM = 128


@torch.library.custom_op(f"{NAMESPACE}::attention", mutates_args=(), device_types="cpu")
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: list[int],
    key_lengths: list[int],
    scale: float,
) -> torch.Tensor:
    return reference.attention(query, key, value, query_lengths, key_lengths, scale)


@_attention.register_kernel("cuda")
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: list[int],
    key_lengths: list[int],
    scale: float,
) -> torch.Tensor:
    from .kernel import launch_attention

    return launch_attention(query, key, value, query_lengths, key_lengths, scale)[0]


@_attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: list[int],
    key_lengths: list[int],
    scale: float,
) -> torch.Tensor:
    return query.new_empty(query.shape)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_lengths: list[int],
    key_lengths: list[int] | None = None,
    scale: float,
) -> torch.Tensor:
    """Causal attention, sequences packed along the first dimension.

    query: [sum(query_lengths), heads, head_dim] bf16; key, value: [sum(key_lengths), kv_heads,
    head_dim] bf16; a sequence's queries are its last `query_length` keys. Returns a tensor like
    query. fp32 inside, one rounding. Heads must be a multiple of kv_heads (grouped-query
    attention). Raises `ValueError` on lengths or heads that do not fit.
    """
    key_lengths = query_lengths if key_lengths is None else key_lengths
    require(
        sum(query_lengths) == query.shape[0] and sum(key_lengths) == key.shape[0],
        f"attention: lengths sum to {sum(query_lengths)} queries and {sum(key_lengths)} keys, "
        f"tensors hold {query.shape[0]} and {key.shape[0]}",
    )
    require(
        all(0 < m <= n for m, n in zip(query_lengths, key_lengths, strict=True)),
        "attention: every sequence needs at least one query and no fewer keys than queries",
    )
    require(
        query.shape[1] % key.shape[1] == 0 and key.shape == value.shape,
        f"attention: {query.shape[1]} heads over {key.shape[1]} key/value heads, "
        f"value {tuple(value.shape)}",
    )
    return _attention(query, key, value, query_lengths, key_lengths, scale)
