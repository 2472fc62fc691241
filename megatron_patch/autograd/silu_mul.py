"""SiLU of the gate times the up projection."""

from __future__ import annotations

from typing import Any

import torch

from .. import ops
from ..function import apply
from ..ops.formats import accumulator_dtype
from .products import op_calls


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        op_calls["silu_mul"] += 1
        ctx.save_for_backward(gate_up)
        return ops.silu_mul(gate_up)

    @staticmethod
    def backward(ctx: Any, out_gradient: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        if gate_up.is_cuda:
            from .kernels.silu_mul import launch_silu_mul_backward

            return launch_silu_mul_backward(gate_up, out_gradient)
        wide = accumulator_dtype(gate_up.dtype)
        gate, up = gate_up.to(wide).chunk(2, dim=-1)
        dy = out_gradient.to(wide)
        sigmoid = torch.sigmoid(gate)
        dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        return torch.cat((dgate, dy * gate * sigmoid), dim=-1).to(gate_up.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`ops.silu_mul` with a gradient. gate_up: [..., 2 * intermediate], gate first."""
    return apply(_SiluMul, gate_up)
