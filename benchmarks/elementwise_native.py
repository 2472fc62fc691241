"""What stock SGLang 0.5.17 computes under `rl_on_policy_target`, as plain PyTorch operations.

Upstream surfaces: `sglang.srt.layers.layernorm.RMSNorm.forward_native` (with fp32 weights, an fp32
residual and the cast before the weight), `sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.
forward_native` (whose rotation is compiled) and `sglang.srt.layers.activation.SiluAndMul.
forward_native`. The operations and their formats, so that a host without SGLang can time them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

FP32 = torch.float32


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    scaled = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps)
    return weight * scaled.to(dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm's result is fp32 there; attention and MLP cast it on entering."""
    stream = x.to(FP32) + residual.to(FP32)
    kept = stream.clone()
    return _norm(stream, weight, eps, FP32).bfloat16(), kept


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin = (t.unsqueeze(-2).to(x.dtype) for t in (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@functools.cache
def _compiled_rotation() -> Callable[..., torch.Tensor]:
    return torch.compile(_rotate, dynamic=True)


def qk_norm_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query, key: [tokens, heads, dim] bf16 views of the fused projection. The rotation takes the
    fp32 product with the weight; its result is cast before attention."""
    query, key = (
        _norm(x.contiguous().to(FP32), w, eps, torch.bfloat16)
        for x, w in ((query, query_weight), (key, key_weight))
    )
    cos, sin = table.index_select(0, positions).chunk(2, dim=-1)
    rotate = _compiled_rotation()
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    return query.bfloat16(), key.bfloat16()


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """bf16 in, between and out."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
