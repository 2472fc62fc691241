"""From the last hidden state to the logprobs of the scored tokens."""

from __future__ import annotations

from typing import Any

import torch

from .. import autograd
from ..config import PolicyTransformerConfig
from ..faults import entering, tap
from ..ops import RankGroup
from ..parallel import MicroBatch
from .linear import PolicyColumnLinear


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

        Returns [rows] fp32: the logprobs of `batch.targets` at `batch.scored`, over the real
        vocabulary at `batch.temperature`, the same on every tensor-parallel rank. Only those rows
        go through the head.
        """
        rows = hidden.view(hidden.shape[0], -1).index_select(0, batch.scored)
        entering(None, "lm_head", rows)
        logits = tap(None, "lm_head", self(rows, weight)[0])
        entering(None, "temperature", logits)
        policy = self.config.policy
        logprobs = autograd.token_logprobs(
            logits,
            batch.targets,
            batch.temperature,
            vocabulary=policy.vocabulary,
            order=policy.logprob_order,
            ranks=RankGroup.of(self.tp_group),
        )
        return tap(None, "logprob", logprobs)
