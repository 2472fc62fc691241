"""The model's shape, and megatron's configuration carrying the contract to every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from .contracts import MegatronRuntimePolicy
from .ops import rope_table


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a dense checkpoint, by the field names of a Hugging Face `config.json`.

    `attention_bias` is a bias on q, k and v (Qwen2.5); `qk_layernorm` a norm per head (Qwen3).
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool = False
    qk_layernorm: bool = True

    @property
    def attention_width(self) -> int:
        """Columns of the query projection: the global K of o_proj."""
        return self.num_attention_heads * self.head_dim


class RopeTable:
    """The fp32 cos/sin table [max_position, head_dim], one copy a device.

    Not a buffer or a parameter: a model-wide `.bfloat16()` reaches those, and a cast table is
    another position embedding.
    """

    def __init__(self, shape: ModelShape) -> None:
        table = rope_table(shape.head_dim, shape.max_position_embeddings, shape.rope_theta)
        self._by_device = {table.device: table}
        self._cpu = table

    def on(self, device: torch.device) -> torch.Tensor:
        """The table on `device`, moved there once and never cast."""
        if device not in self._by_device:
            self._by_device[device] = self._cpu.to(device)
        return self._by_device[device]

    def __deepcopy__(self, memo: dict[int, Any]) -> RopeTable:
        return self


@dataclass(kw_only=True)
class PolicyTransformerConfig(TransformerConfig):
    """TransformerConfig that also carries the contract bound to this trainer, and the RoPE table.

    Raises `ValueError` on a megatron setting under which the contract cannot hold.
    """

    policy: MegatronRuntimePolicy
    rope: RopeTable
    # What the logits of a chunk, and what is made of them, may take; at least one row is taken.
    logits_memory_bytes: int = 256 << 20
    # Also the entropy of every scored token's distribution (`PolicyHead.entropy`).
    entropy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.logits_memory_bytes < 1:
            raise ValueError(
                f"logits_memory_bytes={self.logits_memory_bytes} must be positive, such as 2**28"
            )
        refused = {
            "sequence_parallel": (self.sequence_parallel, False),
            "hidden_dropout": (self.hidden_dropout, 0.0),
            "attention_dropout": (self.attention_dropout, 0.0),
            "fp32_residual_connection": (self.fp32_residual_connection, True),
            "normalization": (self.normalization, "RMSNorm"),
            "gated_linear_unit": (self.gated_linear_unit, True),
            "gradient_accumulation_fusion": (self.gradient_accumulation_fusion, False),
            "num_moe_experts": (self.num_moe_experts, None),
            "fp8": (self.fp8, None),
            "fp4": (self.fp4, None),
            "virtual_pipeline_model_parallel_size": (
                self.virtual_pipeline_model_parallel_size,
                None,
            ),
        }
        wrong = [
            f"{name}={value!r} must be {wanted!r}"
            for name, (value, wanted) in refused.items()
            if value != wanted
        ]
        if self.recompute_granularity == "selective":
            wrong.append("recompute_granularity='selective' must be 'full' or None")
        if wrong:
            raise ValueError("a true on-policy contract cannot hold with: " + "; ".join(wrong))


def common_settings(
    shape: ModelShape,
    *,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    context_parallel_size: int,
    device: torch.device,
    recompute: str,
) -> dict[str, Any]:
    """Megatron settings that follow from the shape and the layout, contract or not.

    `recompute`: `none`, or `full` (every layer is run again in backward).
    """
    if recompute not in ("none", "full"):
        raise ValueError(f"recompute={recompute!r}; choose none or full")
    settings: dict[str, Any] = {
        "num_layers": shape.num_hidden_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_key_value_heads,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.rms_norm_eps,
        "qk_layernorm": shape.qk_layernorm,
        "add_bias_linear": False,
        "add_qkv_bias": shape.attention_bias,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "tensor_model_parallel_size": tensor_parallel_size,
        "pipeline_model_parallel_size": pipeline_parallel_size,
        "context_parallel_size": context_parallel_size,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        # Packed micro-batches differ in length, so stages tell each other their shapes.
        "variable_seq_lengths": pipeline_parallel_size > 1,
        # Not used in a dense model, but megatron refuses its default with variable lengths.
        "moe_token_dispatcher_type": "alltoall",
        # The loss is a sum over tokens; megatron divides once by their global number.
        "calculate_per_token_loss": True,
        "use_cpu_initialization": device.type == "cpu",
        "batch_p2p_comm": device.type != "cpu",
    }
    if recompute == "full":
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return settings
