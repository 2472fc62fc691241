"""The gated MLP: gate_up, SiLU-mul, down."""

from __future__ import annotations

import torch
from megatron.core.transformer.mlp import MLP, MLPSubmodules

from .. import autograd
from ..config import PolicyTransformerConfig
from ..faults import entering, tap
from .linear import PolicyColumnLinear, PolicyRowLinear


class PolicyMLP(MLP):
    """`megatron.core.transformer.mlp.MLP` with our linears and one SiLU-mul kernel."""

    layer_index: int

    def __init__(self, config: PolicyTransformerConfig) -> None:
        super().__init__(
            config,
            MLPSubmodules(linear_fc1=PolicyColumnLinear, linear_fc2=PolicyRowLinear),
            ffn_hidden_size=config.ffn_hidden_size,
        )

    def set_layer_number(self, layer_number: int) -> None:
        """Called by megatron's TransformerLayer with the 1-based number over all stages."""
        self.layer_index = layer_number - 1

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        """hidden_states: [tokens, 1, hidden] bf16 -> ([tokens, 1, hidden] bf16, None)."""
        layer = self.layer_index
        entering(layer, "gate_up_proj", hidden_states)
        gate_up = tap(layer, "gate_up_proj", self.linear_fc1(hidden_states)[0])
        entering(layer, "silu_mul", gate_up)
        gated = tap(layer, "silu_mul", autograd.silu_mul(gate_up))
        entering(layer, "down_proj", gated)
        return tap(layer, "down_proj", self.linear_fc2(gated)[0]), None
