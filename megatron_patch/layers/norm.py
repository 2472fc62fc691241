"""RMSNorm with the contract's rounding points."""

from __future__ import annotations

import torch

from .. import autograd
from ..config import PolicyTransformerConfig
from ..faults import entering, tap


class PolicyRMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension. The weight is a bf16 parameter (the optimizer keeps its
    fp32 master) and is used in fp32, so that rollout and trainer hold the same numbers."""

    def __init__(self, config: PolicyTransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden] bf16, or the fp32 residual stream -> bf16."""
        return autograd.rms_norm(x, self.weight, self.eps)

    def of_stream(self, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """stream: [..., hidden] fp32 -> (its norm, bf16; the stream, for the layer's residual)."""
        return autograd.stream_rms_norm(stream, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [..., hidden] bf16; residual: fp32 -> (norm of the sum, bf16; the sum, fp32)."""
        return autograd.add_rms_norm(x, residual, self.weight, self.eps)


class PolicyFinalNorm(PolicyRMSNorm):
    """The norm after the last layer of the last stage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, 1, hidden], the fp32 residual stream -> bf16."""
        entering(None, "final_norm", x)
        return tap(None, "final_norm", super().forward(x))
