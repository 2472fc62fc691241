"""`sglang.srt.layers.rotary_embedding.base.RotaryEmbedding`: one fp32 table, one written kernel.

Upstream surfaces: `RotaryEmbedding.__init__` (the table), `.forward`, and
`._ensure_cos_sin_cache_length`, which would extend the table on another device and dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import state
from ..ops import rope, rope_table
from .target import Hook


def _table(self: Any, length: int) -> torch.Tensor:
    device = self.cos_sin_cache.device
    return rope_table(self.head_size, length, float(self.base)).to(device)


def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Build as SGLang does, then replace its table by the contract's."""
    original(self, *args, **kwargs)
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    if type(self) is not RotaryEmbedding or not self.is_neox_style:
        raise ValueError(f"{type(self).__name__}: the contract covers plain NeoX-style RoPE only")
    if self.rotary_dim != self.head_size:
        raise ValueError(
            f"rotary_dim={self.rotary_dim} of head_dim={self.head_size}: the contract rotates all"
        )
    with torch.device("cpu"):
        table = _table(self, self.max_position_embeddings)
    self.register_buffer("cos_sin_cache", table, persistent=False)


def extend(original: Callable[..., None], self: Any, needed_max_pos: int) -> None:
    """Longer tables keep every old row's bits: they are made by the same function."""
    length = self.cos_sin_cache.shape[0]
    if needed_max_pos < length:
        return
    longer = _table(self, needed_max_pos + 1)
    self.cos_sin_cache = torch.cat((self.cos_sin_cache, longer[length:]))


def forward(
    original: Callable[..., Any],
    self: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query: [tokens, heads * head_dim] bf16, key likewise; positions: [tokens]."""
    if offsets is not None or fused_set_kv_buffer_arg is not None:
        raise ValueError("rope: offsets and the fused cache write are not part of the contract")
    if self.cos_sin_cache.dtype != torch.float32:
        raise ValueError(f"rope: the table was cast to {self.cos_sin_cache.dtype}; it is float32")
    tokens = positions.numel()
    state.entering("rope", query)
    state.entering("rope_k", key)
    rotated_q, rotated_k = rope(
        query.reshape(tokens, -1, self.head_size),
        key.reshape(tokens, -1, self.head_size),
        positions.flatten(),
        self.cos_sin_cache,
    )
    rotated_q, rotated_k = state.tap("rope", rotated_q), state.tap("rope_k", rotated_k)
    return rotated_q.view(query.shape), rotated_k.view(key.shape)


_CLASS = "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding"
HOOKS = (
    Hook(
        name="rope_table", target=f"{_CLASS}.__init__", digest="094108afd7caf77e", replacement=init
    ),
    Hook(
        name="rope_extend",
        target=f"{_CLASS}._ensure_cos_sin_cache_length",
        digest="c44d95c9291e5726",
        replacement=extend,
    ),
    Hook(
        name="rope",
        target=f"{_CLASS}.forward",
        checked=f"{_CLASS}.forward_native",
        digest="e70aa8ff1c2eb148",
        replacement=forward,
    ),
)
