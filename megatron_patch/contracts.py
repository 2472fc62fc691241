"""Contract -> what this trainer must run, and the fingerprint that the rollout must match."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

import torch

from .ops.digest import source_digest, table_digest
from .schema import (
    Fingerprint,
    RowReduction,
    TrueOnPolicyContract,
    VocabularySegments,
    get_contract,
    padded_vocabulary,
    row_reduction,
    vocabulary_segments,
)
from .schema.reduction import local_association

_PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronRuntimePolicy:
    """A contract bound to one trainer layout.

    `o_proj` and `down_proj` say how each row-parallel sum is associated, as the *rollout* at
    `rollout_tensor_parallel_size` performs it; `vocabulary` holds the segments of the log-softmax;
    `padded_vocab_size` is the number of rows of the trainer's embedding and head tables;
    `attention` is the path of the attention, the rollout's: `fa3`, `triton` or `reference`.
    """

    contract: TrueOnPolicyContract
    segments: int
    rollout_tensor_parallel_size: int
    tensor_parallel_size: int
    vocabulary: VocabularySegments
    padded_vocab_size: int
    o_proj: RowReduction
    down_proj: RowReduction
    attention: str

    @property
    def logits_dtype(self) -> str:
        return self.contract.logprob.logits_dtype

    @property
    def logprob_order(self) -> str:
        return self.contract.logprob.order

    def row_reduction(self, layer: str) -> RowReduction:
        """The reduction of `o_proj` or `down_proj`."""
        return {"o_proj": self.o_proj, "down_proj": self.down_proj}[layer]


def policy_for(
    contract_name: str,
    *,
    segments: int,
    rollout_tensor_parallel_size: int,
    tensor_parallel_size: int,
    vocab_size: int,
    attention_width: int,
    intermediate_size: int,
    attention: str = "reference",
) -> MegatronRuntimePolicy:
    """Bind a contract to this trainer.

    attention_width: `num_attention_heads * head_dim`, the global K of o_proj; intermediate_size:
    the global K of down_proj; attention: the rollout's path. Raises `ValueError` naming the layer
    and the numbers where the contract cannot cut a sum for the rollout, or where this trainer's
    shard would cut a leaf.
    """
    reductions = {}
    for layer, k_global in (("o_proj", attention_width), ("down_proj", intermediate_size)):
        try:
            reduction = row_reduction(
                contract_name,
                k_global,
                rollout_tp=rollout_tensor_parallel_size,
                segments=segments,
            )
            local_association(reduction, tensor_parallel_size)
        except ValueError as error:
            raise ValueError(f"{layer}: {error}") from None
        reductions[layer] = reduction
    return MegatronRuntimePolicy(
        contract=get_contract(contract_name),
        segments=segments,
        rollout_tensor_parallel_size=rollout_tensor_parallel_size,
        tensor_parallel_size=tensor_parallel_size,
        vocabulary=vocabulary_segments(contract_name, vocab_size),
        padded_vocab_size=padded_vocabulary(contract_name, vocab_size),
        o_proj=reductions["o_proj"],
        down_proj=reductions["down_proj"],
        attention=attention,
    )


def fingerprint(
    policy: MegatronRuntimePolicy, device: torch.device, rope_table: torch.Tensor
) -> Fingerprint:
    """What the rollout must match before the first token.

    rope_table: [max_position, head_dim] fp32, the live table. `device` is the GPU's name or `cpu`.
    """
    return Fingerprint(
        contract=policy.contract.name,
        contract_digest=policy.contract.digest(),
        segments=policy.segments,
        rollout_tensor_parallel_size=policy.rollout_tensor_parallel_size,
        schema_digest=source_digest(_PACKAGE / "schema"),
        ops_digest=source_digest(_PACKAGE / "ops"),
        rope_digest=table_digest(rope_table),
        attention=policy.attention,
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        versions=tuple((name, importlib.metadata.version(name)) for name in ("torch", "triton")),
    )
