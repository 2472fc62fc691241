"""`attention`: checks, dispatch and shape inference."""

from __future__ import annotations

import torch

from ..formats import NAMESPACE, eager_on_gpu, require
from . import reference

# FA3's decode has the bits of its prefill for heads of this width alone (docs/parity.md).
FLASH3_HEAD_DIM = 128
MAX_HEAD_DIM = 256
PATHS = ("reference", "fa3", "triton")


def gpu_path(capability: tuple[int, int], head_dim: int) -> str:
    """The path of a GPU unless another is named: `fa3` on Hopper with heads of 128, else `triton`.
    The two have different bits, so both engines of a run take the same."""
    return "fa3" if capability[0] == 9 and head_dim == FLASH3_HEAD_DIM else "triton"


def check_path(path: str, device_type: str, capability: tuple[int, int], head_dim: int) -> None:
    """`ValueError` where a path cannot keep its promise on a device; capability: of its GPU."""
    require(path in PATHS, f"attention path {path!r}: choose from {', '.join(PATHS)}")
    on_cpu = device_type == "cpu"
    require(
        on_cpu == (path == "reference"),
        f"attention path {path!r} on {device_type}: a CPU has the reference, a GPU fa3 or triton",
    )
    if path == "fa3":
        require(
            head_dim == FLASH3_HEAD_DIM,
            f"attention: head_dim={head_dim}; FA3's decode has the bits of its prefill for "
            f"head_dim={FLASH3_HEAD_DIM} alone; use the path triton",
        )
        require(
            capability[0] == 9,
            f"attention path fa3 on a GPU of capability {capability[0]}.{capability[1]}: it was "
            "shown on Hopper (9.x) alone; use the path triton",
        )
    if path == "triton":
        require(
            0 < head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0,
            f"attention path triton: head_dim={head_dim} must be a multiple of 8 up to "
            f"{MAX_HEAD_DIM}",
        )


@torch.library.custom_op(f"{NAMESPACE}::attention", mutates_args=(), device_types="cpu")
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: list[int],
    key_lengths: list[int],
    scale: float,
    path: str | None = None,
) -> torch.Tensor:
    check_path(path or "reference", "cpu", (0, 0), query.shape[2])
    return reference.attention(query, key, value, query_lengths, key_lengths, scale)


@_attention.register_kernel("cuda")
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: list[int],
    key_lengths: list[int],
    scale: float,
    path: str | None = None,
) -> torch.Tensor:
    from .kernel import launch_attention

    return launch_attention(query, key, value, query_lengths, key_lengths, scale, path)[0]


@_attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: list[int],
    key_lengths: list[int],
    scale: float,
    path: str | None = None,
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
    path: str | None = None,
) -> torch.Tensor:
    """Causal attention, sequences packed along the first dimension.

    query: [sum(query_lengths), heads, head_dim] bf16; key, value: [sum(key_lengths), kv_heads,
    head_dim] bf16; a sequence's queries are its last `query_length` keys. Returns a tensor like
    query. fp32 inside, one rounding. Heads must be a multiple of kv_heads (grouped-query
    attention). scale: positive. path: `reference`, `fa3` or `triton`, which have different bits;
    None is the reference on a CPU and `gpu_path` on a GPU. Raises `ValueError` on lengths or heads
    that do not fit, and on a path that the device does not have.
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
    require(scale > 0, f"attention: scale={scale} must be positive")
    if eager_on_gpu(query):
        from .kernel import launch_attention

        return launch_attention(query, key, value, query_lengths, key_lengths, scale, path)[0]
    return _attention(query, key, value, query_lengths, key_lengths, scale, path)
