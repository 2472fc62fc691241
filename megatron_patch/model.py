"""The model of one trainer rank: stock GPTModel and TransformerBlock, our layers in them."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from .config import ModelShape, PolicyTransformerConfig, RopeTable, common_settings
from .contracts import MegatronRuntimePolicy
from .layers.embedding import PolicyEmbedding
from .layers.logits import PolicyHead
from .ops.tree_all_reduce.transport import connect
from .parallel import MicroBatch
from .provider import layer_spec
from .schema import DEFAULT_CONTRACT, padded_vocabulary


class PolicyModel(GPTModel):
    """GPTModel that maps a packed micro-batch to the logprobs of its response tokens.

    Stock GPTModel builds its embedding and head itself, outside the layer spec; both are replaced
    here by ours, which take over the head's and the table's parameters with their attributes
    (tensor-parallel sharding, pipeline-shared embedding).
    """

    embedding: Any
    output_layer: Any

    def __init__(self, config: PolicyTransformerConfig, **kwargs: Any) -> None:
        super().__init__(
            config,
            transformer_layer_spec=layer_spec(config),
            vocab_size=config.policy.padded_vocab_size,
            position_embedding_type="none",
            parallel_output=True,
            **kwargs,
        )
        if self.pre_process:
            self.embedding.word_embeddings = PolicyEmbedding(self.embedding.word_embeddings)
        if self.post_process:
            stock = self.output_layer
            self.output_layer = PolicyHead(
                config,
                self.vocab_size,
                gather_output=False,
                skip_weight_param_allocation=True,
                tp_group=stock.tp_group,
            )
            self.output_layer.weight = stock.weight

    def packed_forward(self, batch: MicroBatch) -> torch.Tensor:
        """On the last stage [rows] fp32 logprobs (see `PolicyHead.logprobs`); elsewhere the fp32
        residual stream [tokens, 1, hidden]."""
        tokens = batch.tokens.unsqueeze(0) if self.pre_process else None
        return self(
            input_ids=tokens, position_ids=None, attention_mask=None, packed_seq_params=batch
        )

    def _postprocess(
        self, hidden_states: torch.Tensor, packed_seq_params: MicroBatch, **_: Any
    ) -> torch.Tensor:
        if not self.post_process:
            return hidden_states
        weight = None
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        return self.output_layer.logprobs(hidden_states, weight, packed_seq_params)


def _stage(shape: ModelShape) -> dict[str, Any]:
    return {
        "max_sequence_length": shape.max_position_embeddings,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "share_embeddings_and_output_weights": shape.tie_word_embeddings,
    }


def build_policy_model(
    shape: ModelShape,
    policy: MegatronRuntimePolicy,
    *,
    device: torch.device,
    recompute: str = "none",
    logits_memory_bytes: int = 256 << 20,
    entropy: bool = False,
    megatron: dict[str, Any] | None = None,
) -> PolicyModel:
    """This rank's model under a contract; megatron's parallel state must be initialised.

    logits_memory_bytes, entropy: see `PolicyTransformerConfig`. megatron: further fields of
    TransformerConfig. Raises `ValueError` where one contradicts the shape, the layout or the
    contract.
    """
    settings = common_settings(
        shape,
        tensor_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        device=device,
        recompute=recompute,
    )
    settings |= {"fp32_residual_connection": True, "pipeline_dtype": torch.float32}
    settings = merged(settings, megatron or {})
    config = PolicyTransformerConfig(
        **settings,
        policy=policy,
        rope=RopeTable(shape),
        logits_memory_bytes=logits_memory_bytes,
        entropy=entropy,
    )
    connect(parallel_state.get_tensor_model_parallel_group(), device)
    return PolicyModel(config, **_stage(shape))


def build_stock_model(
    shape: ModelShape,
    *,
    device: torch.device,
    recompute: str = "none",
    megatron: dict[str, Any] | None = None,
) -> GPTModel:
    """The control: megatron's own local layers in bf16, which follow no contract.

    Raises `ValueError` for context parallelism, which those layers do not have.
    """
    if parallel_state.get_context_parallel_world_size() > 1:
        raise ValueError(
            "contract off: megatron's local attention has no context parallelism; use "
            "context_parallel_size=1"
        )
    settings = common_settings(
        shape,
        tensor_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_parallel_size=1,
        device=device,
        recompute=recompute,
    )
    settings |= {"pipeline_dtype": torch.bfloat16}
    config = TransformerConfig(**merged(settings, megatron or {}))
    model = GPTModel(
        config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            qk_layernorm=shape.qk_layernorm, normalization="RMSNorm"
        ),
        vocab_size=padded_vocabulary(DEFAULT_CONTRACT, shape.vocab_size),
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        parallel_output=True,
        **_stage(shape),
    )
    return model.bfloat16()


def merged(settings: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """`settings` and `extra` together; `ValueError` where both name a field and differ."""
    clashes = [
        f"{name}={extra[name]!r} (the run needs {settings[name]!r})"
        for name in extra
        if name in settings and settings[name] != extra[name]
    ]
    if clashes:
        raise ValueError("megatron settings contradict the run: " + "; ".join(clashes))
    return {**settings, **extra}
