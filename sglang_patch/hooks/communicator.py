"""Sums over ranks: only the contract's, and nothing may go around them.

Upstream surfaces: `layers.communicator.CommunicateWithAllReduceAndLayerNormFn` (would all-reduce
o_proj's output a second time), `distributed.parallel_state.GroupCoordinator.all_reduce` (guarded:
a float sum that no hook ordered is an error, except the embedding's, which adds one row to zeros),
`layers.vocab_parallel_embedding.VocabParallelEmbedding.forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import state
from .target import Hook


def norm_only(
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    forward_batch: Any,
    layernorm: Any,
    context: Any,
    **modes: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o_proj has already summed over the ranks: what is left of 'all-reduce and norm' is the norm.

    hidden_states: [tokens, hidden] bf16; residual: [tokens, hidden] fp32.
    """
    if context.attn_dp_size != 1:
        raise ValueError(f"attn_dp_size={context.attn_dp_size}: a contract needs 1")
    if hidden_states.shape[0] == 0:
        return hidden_states, residual
    return layernorm(hidden_states, residual)


def all_reduce(original: Callable[..., Any], self: Any, input_: torch.Tensor) -> torch.Tensor:
    """Refuse sums over ranks whose order nobody chose."""
    live = state.require()
    if self.world_size > 1 and input_.is_floating_point() and not live.in_embedding:
        raise ValueError(
            f"all-reduce of {input_.dtype} {tuple(input_.shape)} over {self.world_size} ranks "
            f"(group {self.unique_name}, layer {live.layer}) is not ordered by "
            f"{live.policy.contract.name}; turn off the feature that asks for it"
        )
    return original(self, input_)


def embedding(original: Callable[..., Any], self: Any, input_: torch.Tensor) -> torch.Tensor:
    """input_: [tokens] ids -> [tokens, hidden] bf16 rows. Exactly one rank holds a token's row and
    the others add zeros, so the transport's order cannot show."""
    live = state.require()
    live.in_embedding = True
    try:
        out = original(self, input_)
    finally:
        live.in_embedding = False
    live.layer = None
    return state.tap("embedding", out)


_COMMUNICATE = "sglang.srt.layers.communicator.CommunicateWithAllReduceAndLayerNormFn"
HOOKS = (
    Hook(
        name="norm_after_o_proj",
        target=f"{_COMMUNICATE}._gather_hidden_states_and_residual",
        digest="0fb61ad12b268f77",
        replacement=norm_only,
    ),
    Hook(
        name="norm_after_o_proj_attention_group",
        target=f"{_COMMUNICATE}._tp_attn_all_reduce_and_layernorm",
        digest="4829c43e7ac0507a",
        replacement=norm_only,
    ),
    Hook(
        name="all_reduce_guard",
        target="sglang.srt.distributed.parallel_state.GroupCoordinator.all_reduce",
        digest="56d4e285430f5fc9",
        replacement=all_reduce,
    ),
    Hook(
        name="embedding",
        target="sglang.srt.layers.vocab_parallel_embedding.VocabParallelEmbedding.forward",
        digest="d1296caeeb2ae974",
        replacement=embedding,
    ),
)
