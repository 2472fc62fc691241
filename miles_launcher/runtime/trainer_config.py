"""Everything one trainer rank is told, as plain values: it travels to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

CONTRACT_OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRankConfig:
    """One rank of the trainer. Sizes are counts; times in seconds.

    `contract` is a registry name, or `off`: megatron's own layers and a plain log-softmax, the
    control that must not come out exact. `segments` and `rollout_tensor_parallel_size` are the
    rollout's, and so is `attention`: `fa3` or `triton` on a GPU. A micro-batch holds at most
    `micro_batch_size` sequences and `micro_batch_tokens` tokens (0: any number). `fault` is
    `LAYER:OP[:RANK[:TOKEN]]`. `megatron` holds further TransformerConfig fields (dtypes and
    activation as strings) and `model` GPTModel arguments, as the plan rendered them; one that
    contradicts the others is an error.
    """

    rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int
    device: Literal["cpu", "cuda"]
    local_device_index: int = 0
    num_threads: int = 1
    start_timeout_s: float = 120.0

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1

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

    contract: str
    segments: int
    rollout_tensor_parallel_size: int
    attention: str = "reference"

    lr: float = 1e-6
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0

    micro_batch_size: int = 8
    micro_batch_tokens: int = 0
    recompute: Literal["none", "full"] = "none"
    logits_memory_bytes: int = 256 << 20
    entropy: bool = False
    fault: str | None = None
    seed: int = 0
    megatron: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        product = (
            self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size
        )
        wrong = []
        if product != self.world_size or not 0 <= self.rank < self.world_size:
            wrong.append(
                f"rank {self.rank} of world_size={self.world_size}, but tp * pp * cp = "
                f"{self.tensor_parallel_size} * {self.pipeline_parallel_size} * "
                f"{self.context_parallel_size} = {product}"
            )
        if self.num_hidden_layers % self.pipeline_parallel_size:
            wrong.append(
                f"num_hidden_layers={self.num_hidden_layers} is not divisible by "
                f"pipeline_parallel_size={self.pipeline_parallel_size}"
            )
        if self.micro_batch_size < 1:
            wrong.append(f"micro_batch_size={self.micro_batch_size} must be at least 1")
        if self.micro_batch_tokens < 0:
            wrong.append(f"micro_batch_tokens={self.micro_batch_tokens} must not be negative")
        if self.clip_grad <= 0:
            wrong.append(f"clip_grad={self.clip_grad} must be positive (use a large one for none)")
        if self.contract != CONTRACT_OFF and (self.device == "cpu") != (
            self.attention == "reference"
        ):
            wrong.append(
                f"attention={self.attention!r} on {self.device}: a CPU has the reference, a GPU "
                "fa3 or triton"
            )
        if self.contract == CONTRACT_OFF and self.fault is not None:
            wrong.append(f"fault={self.fault!r} needs a contract: stock layers have no taps")
        if self.contract == CONTRACT_OFF and self.entropy:
            wrong.append("entropy=True needs a contract: the stock head computes none")
        if wrong:
            raise ValueError("trainer rank: " + "; ".join(wrong))
