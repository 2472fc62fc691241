"""One transformer layer around an fp32 residual stream."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from ..faults import entering, tap
from ..parallel import MicroBatch


class PolicyTransformerLayer(TransformerLayer):
    """`megatron.core.transformer.transformer_layer.TransformerLayer` whose hidden state is the
    fp32 residual stream, as in the rollout.

    The rollout carries (x, residual) and adds them in the next norm, `x + residual` in fp32. That
    one addition is done here at the end of the layer instead. Same operands, same format, hence
    the same bits; so a pipeline stage sends one fp32 tensor, the sum, where the pair would be
    added first thing by the next stage. (Sent as bf16 it would be rounded earlier: `pipeline_dtype`
    must be float32.)
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        packed_seq_params: MicroBatch | None = None,
        inference_context: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states: [tokens, 1, hidden] fp32 -> (the same shape and dtype, None).

        The other arguments that megatron passes (masks, rotary embeddings) have no meaning here.
        """
        if packed_seq_params is None or inference_context is not None:
            raise ValueError(
                f"layer {self.layer_number - 1}: needs a packed micro-batch and no inference "
                "context; call the model through its packed forward"
            )
        assert hidden_states.dtype in (torch.float32, torch.float64), hidden_states.dtype
        layer = self.layer_number - 1
        entering(layer, "input_layernorm", hidden_states)
        x, hidden_states = self.input_layernorm.of_stream(hidden_states)
        x = tap(layer, "input_layernorm", x)
        x = self.self_attention(x, packed_seq_params)
        x, stream = self.pre_mlp_layernorm.add(x, hidden_states)
        entering(layer, "post_attention_layernorm", stream)
        x = tap(layer, "post_attention_layernorm", x)
        x = self.mlp(x)[0]
        # One addition in the stream's format: widening bf16 is exact.
        return stream + x, None
