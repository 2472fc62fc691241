"""`sglang.srt.models.qwen3.Qwen3Attention.forward_prepare_native`: from hidden states to query, key
and value, with the head norms and the rotation in one launch.

Where somebody looks between the ops (taps, an injected fault), SGLang's own lines run: they reach
the hooks of `norm.py` and `rope.py`, one op at a time, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import state
from ..ops import qk_norm_rope
from .target import Hook

# What a fused pass is counted as; the hook itself counts every pass.
FUSED = "qk_norm_rope"


def forward_prepare(
    original: Callable[..., Any], self: Any, positions: torch.Tensor, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden_states: [tokens, hidden] bf16; positions: [tokens] -> query [tokens, heads *
    head_dim], key and value [tokens, kv_heads * head_dim], bf16; the value is a view of the
    projection."""
    live = state.require()
    if live.taps is not None or live.fault is not None:
        result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = original(
            self, positions, hidden_states
        )
        return result
    norms = (self.q_norm, self.k_norm)
    eps = {norm.variance_epsilon for norm in norms}
    if len(eps) != 1 or any(norm.variance_size_override for norm in norms):
        raise ValueError(
            f"layer {self.attn.layer_id}: q_norm and k_norm with eps {sorted(eps)} or partial "
            "variances are not part of the contract"
        )
    live.calls[FUSED] += 1
    qkv, _ = self.qkv_proj(hidden_states)
    query, key, value = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
    query, key = qk_norm_rope(
        query.unflatten(-1, (-1, self.head_dim)),
        key.unflatten(-1, (-1, self.head_dim)),
        self.q_norm.weight,
        self.k_norm.weight,
        self.q_norm.variance_epsilon,
        positions.flatten(),
        self.rotary_emb.cos_sin_cache,
    )
    return query.flatten(1), key.flatten(1), value


HOOKS = (
    Hook(
        name="attention_inputs",
        target="sglang.srt.models.qwen3.Qwen3Attention.forward_prepare_native",
        digest="8c0f404193760510",
        replacement=forward_prepare,
    ),
)
