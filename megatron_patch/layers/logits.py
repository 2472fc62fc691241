"""From the last hidden state to the logprobs of the scored tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from .. import autograd
from ..config import PolicyTransformerConfig
from ..faults import entering, tap
from ..ops import RankGroup
from ..parallel import MicroBatch
from .linear import PolicyColumnLinear

# fp32 [rows, columns] tensors alive at once in a chunk's backward: logits, scaled, exponentials,
# two gradients, and their copy for the products.
_COPIES = 6


def rows_per_chunk(memory_bytes: int, columns: int) -> int:
    """How many rows of `columns` logits, with what is made of them, `memory_bytes` hold; at least
    one. The same on every tensor-parallel rank, which exchange a chunk's numbers."""
    return max(1, memory_bytes // (4 * _COPIES * columns))


class PolicyHead(PolicyColumnLinear):
    """The lm_head over this rank's rows of the padded table, whole vocabulary segments."""

    def __init__(self, config: PolicyTransformerConfig, vocab_size: int, **kwargs: Any) -> None:
        super().__init__(
            config.hidden_size,
            vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            **kwargs,
        )
        self.out_dtype = config.policy.logits_dtype

    def logprobs(
        self, hidden: torch.Tensor, weight: torch.Tensor | None, batch: MicroBatch
    ) -> torch.Tensor:
        """hidden: [T, 1, hidden] bf16, after the final norm; weight: the tied table, or None.

        The logits of all rows never exist at once: rows go through in chunks of at most
        `logits_memory_bytes`, forward and backward. A row's bits do not depend on its chunk.

        Returns [rows] fp32: the logprobs of `batch.targets` at `batch.scored`, over the real
        vocabulary at `batch.temperature`, the same on every tensor-parallel rank. Only those rows
        go through the head.
        """
        rows = hidden.view(hidden.shape[0], -1).index_select(0, batch.scored)
        columns = self.output_size_per_partition
        step = rows_per_chunk(self.config.logits_memory_bytes, columns)
        chunks = list(zip(rows.split(step), batch.targets.split(step), strict=True))
        if len(chunks) == 1 or not torch.is_grad_enabled():
            parts = [self._chunk(x, weight, targets, batch) for x, targets in chunks]
        else:
            # Only the rows of hidden states are kept; a chunk's logits are made again in backward.
            parts = [
                checkpoint(
                    self._chunk,
                    x,
                    weight,
                    targets,
                    batch,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
                for x, targets in chunks
            ]
        return tap(None, "logprob", torch.cat(parts))

    def _chunk(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor | None,
        targets: torch.Tensor,
        batch: MicroBatch,
    ) -> torch.Tensor:
        entering(None, "lm_head", rows)
        logits = tap(None, "lm_head", self(rows, weight)[0])
        entering(None, "temperature", logits)
        policy = self.config.policy
        return autograd.token_logprobs(
            logits,
            targets,
            batch.temperature,
            vocabulary=policy.vocabulary,
            order=policy.logprob_order,
            ranks=RankGroup.of(self.tp_group),
        )
