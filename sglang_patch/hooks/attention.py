"""Attention: the reference on a CPU; on a GPU the engine's own FA3 with one split, or ours.

Upstream surfaces: `RadixAttention.forward`, whose tensors are tapped and which is counted on every
device; `TorchNativeAttnBackend._run_sdpa_forward_extend` and `_run_sdpa_forward_decode`, which call
PyTorch's scaled_dot_product_attention, whose bits depend on the batch; of the engine's Triton
backend `_forward_extend_unified`, whose kernel has another order than its decode, and
`forward_decode`.
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


def _check_layer(backend: Any, layer: Any, cap: float, **absent: Any) -> None:
    """`ValueError` for what the engine's Triton backend can do and no contract has."""
    broken = [f"{name}={value!r}" for name, value in absent.items() if value is not None]
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        broken.append(f"sliding_window_size={layer.sliding_window_size}")
    if cap:
        broken.append(f"logit_cap={cap}")
    if layer.is_cross_attention or layer.qk_head_dim != layer.v_head_dim:
        broken.append("cross attention or values of another width")
    if layer.k_scale is not None or backend._translate_kv_loc is not None:
        broken.append("a scaled or virtually addressed cache")
    if broken:
        raise ValueError(
            f"layer {layer.layer_id}: attention with {', '.join(broken)} is not part of the "
            "contract"
        )


def _run_paged(
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    query_starts: torch.Tensor | None,
    longest_query: int,
) -> torch.Tensor:
    """The Triton path over the engine's cache. Lengths and slots stay on the device, so that a
    captured step reads those of its replay; the longest context alone shapes the launch."""
    from ..ops.attention.kernel_triton import PagedKeys, launch_keys

    count, shape = forward_batch.batch_size, (-1, layer.tp_q_head_num, layer.qk_head_dim)
    launch_keys(
        query.view(shape),
        backend.token_to_kv_pool.get_key_buffer(layer.layer_id),
        backend.token_to_kv_pool.get_value_buffer(layer.layer_id),
        PagedKeys(
            lengths=forward_batch.seq_lens[:count],
            table=backend.req_to_token,
            requests=forward_batch.req_pool_indices[:count],
        ),
        scale=layer.scaling,
        query_starts=query_starts,
        longest_query=longest_query,
        longest_key=backend.max_context_len,
        out=output.view(shape),
        with_lse=False,
    )
    return output


def triton_extend(
    original: Callable[..., Any],
    self: Any,
    q: torch.Tensor,
    o: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    causal: bool,
    logits_soft_cap: float,
    sinks: torch.Tensor | None,
    score_mod: Any = None,
    aux_tensors: Any = None,
) -> torch.Tensor:
    """Prefill, behind a cached prefix or a chunk: q [tokens, heads * head_dim]; the keys and values
    of this pass are in the cache by now. Fills and returns o."""
    _check_layer(self, layer, logits_soft_cap, sinks=sinks, score_mod=score_mod)
    if not causal or self.forward_metadata.custom_mask is not None:
        raise ValueError(f"layer {layer.layer_id}: only causal attention is part of the contract")
    starts = self.forward_metadata.qo_indptr
    return _run_paged(
        self, q, o, layer, forward_batch, starts, self.forward_metadata.max_extend_len
    )


def triton_decode(
    original: Callable[..., Any],
    self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    sinks: torch.Tensor | None = None,
    score_mod: Any = None,
    aux_tensors: Any = None,
) -> torch.Tensor:
    """Decode: one query token a request, q [requests, heads * head_dim]; k and v enter the cache
    first, as in the engine's own."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    _check_layer(self, layer, layer.logit_cap, sinks=sinks, score_mod=score_mod)
    q = q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim)
    if save_kv_cache:
        place = KVWriteLoc(forward_batch.out_cache_loc, None)
        self._set_kv_buffer(forward_batch, layer, place, k, v)
    return _run_paged(self, q, torch.empty_like(q), layer, forward_batch, None, 1)


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
_TRITON = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
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
    Hook(
        name="attention_triton_extend",
        target=f"{_TRITON}._forward_extend_unified",
        digest="c69edacc9e13607f",
        replacement=triton_extend,
    ),
    Hook(
        name="attention_triton_decode",
        target=f"{_TRITON}.forward_decode",
        digest="60e35b1ee3aa4bbe",
        replacement=triton_decode,
    ),
)
