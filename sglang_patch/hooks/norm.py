"""`sglang.srt.layers.layernorm.RMSNorm` and the q/k norm: one op with an fp32 residual stream.

Upstream surfaces: `RMSNorm.forward` (every platform's variant is behind it) and
`models.utils.apply_qk_norm`, which may otherwise take a fused in-place kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import state
from ..ops import rms_norm
from .target import Hook


def forward(
    original: Callable[..., Any],
    self: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    **unsupported: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x: [tokens, hidden] bf16, residual: fp32 stream or None -> out bf16, or (out, stream)."""
    place = self.true_on_policy_place
    if post_residual_addition is not None or unsupported or self.variance_size_override:
        raise ValueError(
            f"layer {place.layer} {place.op}: post-residual additions and partial variances are "
            "not part of the contract"
        )
    # The first residual of a model is the embedding itself, in bf16; widening it is exact.
    stream_in = None if residual is None else residual.float()
    out, stream = rms_norm(x.contiguous(), self.weight, self.variance_epsilon, residual=stream_in)
    if place.op not in ("q_norm", "k_norm"):
        # (The rows of those are heads here; `qk_norm` taps them as rows of tokens.)
        # What is normalised is the sum; the trainer has it as one tensor, and so it is compared.
        state.entering(place.op, x if stream is None else stream, place.layer)
        out = state.tap(place.op, out)
    return out if stream is None else (out, stream)


def fused(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """All-reduce and norm in one kernel: never under a contract."""
    raise ValueError(
        "the fused all-reduce and norm goes around the ordered sum over ranks; "
        "start the engine without all-reduce fusion"
    )


def qk_norm(
    original: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    q_norm: Any,
    k_norm: Any,
    head_dim: int,
    alt_stream: Any = None,
    allow_inplace: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-head norms; q: [tokens, heads * head_dim] bf16, k likewise."""
    layer = q_norm.true_on_policy_place.layer
    state.entering("q_norm", q, layer)
    state.entering("k_norm", k, layer)
    query = q_norm(q.reshape(-1, head_dim)).view(q.shape)
    key = k_norm(k.reshape(-1, head_dim)).view(k.shape)
    return state.tap("q_norm", query, layer), state.tap("k_norm", key, layer)


HOOKS = (
    Hook(
        name="rms_norm",
        target="sglang.srt.layers.layernorm.RMSNorm.forward",
        checked="sglang.srt.layers.layernorm.RMSNorm.forward_native",
        digest="671406a88fe197a9",
        replacement=forward,
    ),
    Hook(
        name="fused_all_reduce_norm",
        target="sglang.srt.layers.layernorm._forward_with_allreduce_fusion",
        digest="eb2049109d601112",
        replacement=fused,
    ),
    Hook(
        name="qk_norm",
        target="sglang.srt.models.utils.apply_qk_norm",
        digest="00e19e9b462be9a7",
        replacement=qk_norm,
    ),
)
