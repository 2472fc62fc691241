"""From the last hidden state to the logprobs of the scored tokens."""

from __future__ import annotations

from typing import Any

import torch

from .. import autograd
from ..config import PolicyTransformerConfig
from ..faults import tap
from ..ops import RankGroup
from ..parallel import MicroBatch
from .linear import PolicyColumnLinear


class PolicyHead(PolicyColumnLinear):
    """The lm_head over this rank's rows of the padded table, whole vocabulary segments.

    `entropy`: of the last call's rows, [rows] fp32 in nats, where the configuration asks for it.
    """

    def __init__(self, config: PolicyTransformerConfig, vocab_size: int, **kwargs: Any) -> None:
        super().__init__(
            config.hidden_size,
            vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            **kwargs,
        )
        policy = config.policy
        self.out_dtype = policy.logits_dtype
        self.settings = autograd.HeadSettings(
            vocabulary=policy.vocabulary,
            order=policy.logprob_order,
            out_dtype=policy.logits_dtype,
            ranks=RankGroup.of(self.tp_group),
            memory_bytes=config.logits_memory_bytes,
            entropy=config.entropy,
        )
        self.entropy: torch.Tensor | None = None

    def logprobs(
        self, hidden: torch.Tensor, weight: torch.Tensor | None, batch: MicroBatch
    ) -> torch.Tensor:
        """hidden: [T, 1, hidden] bf16, after the final norm; weight: the tied table, or None.

        Returns [rows] fp32: the logprobs of `batch.targets` at `batch.scored`, over the real
        vocabulary at `batch.temperature`, the same on every tensor-parallel rank. Only those rows
        go through the head, and their logits never exist at once: see `autograd.head_logprobs`.
        """
        rows = hidden.view(hidden.shape[0], -1).index_select(0, batch.scored)
        weight = self.weight if weight is None else weight
        logprobs, self.entropy = autograd.head_logprobs(
            rows, weight, batch.targets, batch.temperature, self.settings
        )
        return tap(None, "logprob", logprobs)
