"""One differentiable function per op: the forward is the vendored op, the backward is written out.

Gradients need not match the rollout, which has none; they must be right and repeatable. Sums that
tensor parallelism cuts are cut into the same blocks at every degree and added as the same tree in
fp32, and parameter gradients go to megatron's fp32 `main_grad` without passing through bf16.
"""

from .attention import attention
from .embedding import embedding
from .linear import linear
from .logprob import HeadSettings, head_logprobs
from .qk_norm_rope import HeadLayout, qk_norm_rope
from .rms_norm import add_rms_norm, rms_norm, stream_rms_norm
from .rope import rope
from .row_linear import row_linear
from .silu_mul import silu_mul

__all__ = [
    "HeadLayout",
    "HeadSettings",
    "add_rms_norm",
    "attention",
    "embedding",
    "head_logprobs",
    "linear",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "row_linear",
    "silu_mul",
    "stream_rms_norm",
]
