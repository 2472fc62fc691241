"""The numerical truth: one folder per op, shared by rollout and trainer.

Each folder reads in the same order: `reference.py` (plain PyTorch, the written order and the CPU
implementation), `kernel.py` (Triton), `op.py` (the `torch.library` op: checks, fake, dispatch).
Nothing here imports SGLang or Megatron. The copy in `megatron_patch` is byte-identical, and so the
torch.library namespace is the name of the package that holds the copy.
"""

from .attention.op import attention
from .linear.op import linear
from .log_softmax.op import (
    combine_entropy,
    combine_segments,
    log_softmax,
    segment_statistics,
    temperature_logits,
    token_statistics,
)
from .logits_gradient.op import logits_gradient
from .qk_norm_rope.op import qk_norm_rope
from .rms_norm.op import rms_norm
from .rope.op import rope, rope_table
from .row_linear.matmul_tp_inv import matmul_tp_inv
from .row_linear.op import combine_partials, row_linear, row_linear_partial
from .silu_mul.op import silu_mul
from .tree_all_reduce.op import (
    RankGroup,
    gather_ranks,
    tree_all_reduce,
    tree_reduce_scatter,
)

__all__ = [
    "RankGroup",
    "attention",
    "combine_entropy",
    "combine_partials",
    "combine_segments",
    "gather_ranks",
    "linear",
    "log_softmax",
    "matmul_tp_inv",
    "qk_norm_rope",
    "logits_gradient",
    "rms_norm",
    "rope",
    "rope_table",
    "row_linear",
    "row_linear_partial",
    "segment_statistics",
    "silu_mul",
    "temperature_logits",
    "token_statistics",
    "tree_all_reduce",
    "tree_reduce_scatter",
]
