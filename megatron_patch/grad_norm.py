"""The norm of the whole model's gradient, the same number at every tensor-parallel size.

Without Apex or Transformer Engine, megatron-core adds a tensor's squares in one fp32 accumulator
(`local_multi_tensor_l2_norm`), which on a CPU is off by some 1e-5 and by another amount for every
sharding; clipping then scales TP=1 and TP=2 differently. Here the squares are added in fp64.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from .ops import RankGroup, gather_ranks


@torch.no_grad()
def gradient_norm(model: torch.nn.Module) -> float:
    """2-norm of all `main_grad`s, each counted once; collective over tensor and pipeline ranks.

    Call it after megatron has finalised the gradients; context-parallel replicas hold equal ones.
    """
    device = next(model.parameters()).device
    total = torch.zeros(1, dtype=torch.float64, device=device)
    parameter: Any
    for parameter in model.parameters():
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter):
            total += torch.linalg.vector_norm(parameter.main_grad, dtype=torch.float64).square()
    ranks = RankGroup.of(parallel_state.get_model_parallel_group())
    return float(torch.stack(gather_ranks(total, ranks)).sum().sqrt())


def clip_gradients(ddp: DistributedDataParallel, largest_norm: float) -> float:
    """Scale the gradient buffers so that the norm is at most `largest_norm`; return it unscaled.

    Raises `ValueError` where the norm is not finite: a step would write that into every weight.
    """
    norm = gradient_norm(ddp.module)
    if not norm < float("inf"):
        raise ValueError(f"gradient norm is {norm}: the loss or a gradient is not finite")
    scale = largest_norm / (norm + 1.0e-6)
    if scale < 1.0:
        ddp.scale_gradients(scale)
    return norm
