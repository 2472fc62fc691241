"""Self-attention over packed sequences, with Ulysses context parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention

from .. import autograd
from ..autograd import HeadLayout
from ..config import PolicyTransformerConfig
from ..faults import entering, observed, tap
from ..ops import RankGroup
from ..parallel import MicroBatch, gather_partial, heads_to_sequence, sequence_to_heads
from ..parallel.ulysses import replicate_heads
from .rope import PolicyRope


class PolicyCoreAttention(torch.nn.Module):
    """Causal attention of packed sequences; the same path on both sides."""

    def __init__(
        self,
        config: PolicyTransformerConfig,
        layer_number: int,
        pg_collection: Any,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.layer_index = layer_number - 1
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.path = config.policy.attention
        self.ranks = RankGroup.of(pg_collection.cp)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: MicroBatch
    ) -> torch.Tensor:
        """query: [T, heads, head_dim]; key, value: [T, kv_heads, head_dim], this rank's tokens.

        Returns [T, heads, head_dim]. With context parallelism the tokens of all ranks are put
        together, in their natural order and without padding, on a share of the heads each.
        """
        if self.ranks.size == 1:
            return autograd.attention(
                query, key, value, lengths=batch.lengths, scale=self.scale, path=self.path
            )
        assert batch.natural is not None
        heads, size = query.shape[1], self.ranks.size
        if heads % size:
            raise ValueError(
                f"layer {self.layer_index}: {heads} attention heads per tensor-parallel rank are "
                f"not divisible by context_parallel_size={size}; choose another"
            )
        key, value = replicate_heads(key, self.ranks), replicate_heads(value, self.ranks)
        whole = [sequence_to_heads(x, batch.natural, self.ranks) for x in (query, key, value)]
        out = autograd.attention(*whole, lengths=batch.lengths, scale=self.scale, path=self.path)
        return heads_to_sequence(out, batch.natural, query.shape[0], self.ranks)


class PolicySelfAttention(SelfAttention):
    """`megatron.core.transformer.attention.SelfAttention` with our order of operations.

    Construction, parameter names and the fused per-group qkv layout are megatron's. Where there
    are fewer KV heads than ranks, consecutive ranks share one, as in the rollout.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        heads, groups = self.config.num_attention_heads, self.config.num_query_groups
        if heads % self.world_size or max(groups, self.world_size) % min(groups, self.world_size):
            raise ValueError(
                f"{heads} attention heads and {groups} key/value heads cannot be shared by "
                f"tensor_parallel_size={self.world_size}; choose a divisor of both"
            )
        self.layer_index = self.layer_number - 1
        self.ranks = RankGroup.of(self.tp_group)
        self.rope = PolicyRope(self.config.rope)

    def _own_heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, HeadLayout]:
        """[T, N_local] in megatron's per-group layout -> rows that hold this rank's heads, and
        where they stand there."""
        dim, groups, size = self.config.kv_channels, self.config.num_query_groups, self.world_size
        per_group = self.config.num_attention_heads // groups
        shared = size // groups if groups < size else 1
        first, owned = 0, per_group
        if shared > 1:
            # A rank's rows of the fused weight are not whole groups: fetch the group it shares.
            mixed = gather_partial(mixed, self.ranks)
            width = (per_group + 2) * dim
            start = (self.ranks.rank // shared) * width
            mixed = mixed[:, start : start + width]
            owned = per_group // shared
            first = (self.ranks.rank % shared) * owned
        groups = mixed.shape[1] // ((per_group + 2) * dim)
        return mixed, HeadLayout(
            groups=groups, per_group=per_group, dim=dim, first=first, owned=owned
        )

    def _one_by_one(
        self, mixed: torch.Tensor, heads: HeadLayout, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value with the norms and the rotation as ops of their own."""
        layer = self.layer_index
        query, key, value = heads.split(mixed)
        query = query.reshape(mixed.shape[0], -1, heads.dim)
        if self.config.qk_layernorm:
            entering(layer, "q_norm", query)
            entering(layer, "k_norm", key)
            query = tap(layer, "q_norm", self.q_layernorm(query))
            key = tap(layer, "k_norm", self.k_layernorm(key))
        entering(layer, "rope", query)
        entering(layer, "rope_k", key)
        query, key = self.rope(query, key, positions)
        return query, key, value

    def forward(self, hidden_states: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """hidden_states: [T, 1, hidden] bf16, the same on every rank -> [T, 1, hidden] bf16."""
        layer, tokens = self.layer_index, hidden_states.shape[0]
        entering(layer, "qkv_proj", hidden_states)
        mixed = tap(layer, "qkv_proj", self.linear_qkv(hidden_states)[0])
        mixed, heads = self._own_heads(mixed.view(tokens, -1))
        if self.config.qk_layernorm and not observed():
            query, key, value = autograd.qk_norm_rope(
                mixed,
                self.q_layernorm.weight,
                self.k_layernorm.weight,
                self.q_layernorm.eps,
                batch.positions,
                self.rope.table.on(mixed.device),
                heads,
            )
        else:
            # The same bits; the taps see what passes between the ops.
            query, key, value = self._one_by_one(mixed, heads, batch.positions)
        query, key = tap(layer, "rope", query), tap(layer, "rope_k", key)
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            entering(layer, "attention", tensor, name)
        out = tap(layer, "attention", self.core_attention(query, key, value, batch))
        out = out.view(tokens, 1, -1)
        entering(layer, "o_proj", out)
        return tap(layer, "o_proj", self.linear_proj(out)[0])
