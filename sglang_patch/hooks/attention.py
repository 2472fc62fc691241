"""Attention: the reference on a CPU; on a GPU the engine's own FA3 with one split.

Upstream surfaces: `RadixAttention.forward`, whose tensors are tapped and which is counted on every
device; `TorchNativeAttnBackend._run_sdpa_forward_extend` and `_run_sdpa_forward_decode`, which call
PyTorch's scaled_dot_product_attention, whose bits depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import state
from ..ops import attention
from .target import Hook


def _run(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    key_lengths: list[int],
    query_lengths: list[int],
    scale: float,
) -> torch.Tensor:
    slots = torch.cat(
        [
            req_to_token[request, :length]
            for request, length in zip(req_pool_indices.tolist(), key_lengths, strict=True)
        ]
    )
    out = attention(
        query,
        k_cache[slots],
        v_cache[slots],
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        scale=scale,
    )
    output.copy_(out)
    return output


def _check(kwargs: dict[str, Any]) -> None:
    wanted = {"encoder_lens": None, "is_cross_attn": False, "sliding_window_size": None}
    broken = [f"{k}={kwargs[k]!r}" for k, v in wanted.items() if kwargs.get(k, v) != v]
    if broken:
        raise ValueError(f"attention with {', '.join(broken)} is not part of the contract")


def extend(
    original: Callable[..., Any],
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Prefill: query [tokens, heads, head_dim]; keys and values from the cache, prefix included."""
    _check({**kwargs, "encoder_lens": encoder_lens})
    assert scaling is not None
    return _run(
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens.tolist(),
        extend_seq_lens.tolist(),
        scaling,
    )


def decode(
    original: Callable[..., Any],
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Decode: one query token a request, [requests, heads, head_dim]."""
    _check({**kwargs, "encoder_lens": encoder_lens})
    assert scaling is not None
    lengths = seq_lens.tolist()
    return _run(
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        lengths,
        [1] * len(lengths),
        scaling,
    )


def forward(
    original: Callable[..., torch.Tensor],
    self: Any,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """q: [tokens, heads * head_dim] bf16; k, v: [tokens, kv_heads * head_dim] of this pass, before
    they enter the cache. The backend's own attention runs; what enters and leaves it is tapped."""
    if k is None or v is None:
        raise ValueError(f"layer {self.layer_id}: attention on another layer's keys and values")
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        state.entering("attention", tensor, self.layer_id, name)
    return state.tap("attention", original(self, q, k, v, forward_batch, *args, **kwargs))


_CLASS = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
HOOKS = (
    Hook(
        name="attention",
        target="sglang.srt.layers.radix_attention.RadixAttention.forward",
        digest="eac55d011907e247",
        replacement=forward,
    ),
    Hook(
        name="attention_extend",
        target=f"{_CLASS}._run_sdpa_forward_extend",
        digest="cd0f84f549310107",
        replacement=extend,
    ),
    Hook(
        name="attention_decode",
        target=f"{_CLASS}._run_sdpa_forward_decode",
        digest="062856df45d2fe12",
        replacement=decode,
    ),
)
