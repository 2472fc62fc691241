"""SiLU-mul in plain PyTorch: the written order, and what runs on a CPU."""

from __future__ import annotations

import torch

from ..elementary import exp
from ..formats import accumulator_dtype


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `op.silu_mul`. SwiGLU of Shazeer, 2020 (arXiv 2002.05202)."""
    gate, up = gate_up.to(accumulator_dtype(gate_up.dtype)).chunk(2, dim=-1)
    # exp of -|g| cannot overflow; both branches of the sigmoid are one division.
    e = exp(-gate.abs())
    sigmoid = torch.where(gate >= 0, torch.ones_like(e), e) / (1.0 + e)
    return (gate * sigmoid * up).to(gate_up.dtype)
