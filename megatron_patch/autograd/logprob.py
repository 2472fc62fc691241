"""From logits to the logprob of given tokens, without a full row of the vocabulary per rank."""

from __future__ import annotations

from typing import Any

import torch

from .. import ops
from ..faults import tap_value
from ..function import apply
from ..ops import RankGroup, gather_ranks
from ..ops.formats import accumulator_dtype
from ..schema import VocabularySegments
from .products import op_calls


def _normaliser_of_segments(
    scaled: torch.Tensor, vocabulary: VocabularySegments, ranks: RankGroup
) -> torch.Tensor:
    """Log-sum-exp of each row from every rank's own segments; [rows, columns] -> [rows]."""
    count = vocabulary.num_segments // ranks.size
    statistics = ops.segment_statistics(scaled, vocabulary, ranks.rank * count, count)
    largest, total = (torch.cat(gather_ranks(x, ranks), dim=-1) for x in statistics)
    return ops.combine_segments(largest, total)


def _normaliser_of_rows(
    scaled: torch.Tensor, vocabulary: VocabularySegments, ranks: RankGroup
) -> torch.Tensor:
    """Log-sum-exp of each row, its shards gathered and cut to the real vocabulary first."""
    rows = torch.cat(gather_ranks(scaled, ranks), dim=-1)[:, : vocabulary.vocab_size]
    statistics = ops.segment_statistics(rows, vocabulary, 0, vocabulary.num_segments)
    return ops.combine_segments(*statistics)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: torch.Tensor,
        vocabulary: VocabularySegments,
        order: str,
        ranks: RankGroup,
    ) -> torch.Tensor:
        op_calls[f"log_softmax:{order}"] += 1
        columns = logits.shape[1]
        first = ranks.rank * columns
        scaled = ops.temperature_logits(logits, temperature)
        scaled = tap_value(None, "temperature", scaled)
        normalise = _normaliser_of_segments if order == "segments" else _normaliser_of_rows
        normaliser = normalise(scaled, vocabulary, ranks)
        local = (targets - first).clamp(0, columns - 1)
        chosen = scaled.gather(1, local.unsqueeze(1)).squeeze(1)
        if ranks.size > 1:
            parts = torch.stack(gather_ranks(chosen, ranks))
            owner = targets.div(columns, rounding_mode="floor")
            chosen = parts[owner, torch.arange(targets.shape[0], device=targets.device)]
        ctx.save_for_backward(logits, targets, temperature, normaliser)
        ctx.first, ctx.vocab_size = first, vocabulary.vocab_size
        return chosen - normaliser

    @staticmethod
    def backward(ctx: Any, out_gradient: torch.Tensor) -> tuple[Any, ...]:
        logits, targets, temperature, normaliser = ctx.saved_tensors
        wide = accumulator_dtype(logits.dtype)
        columns = logits.shape[1]
        scaled = ops.temperature_logits(logits, temperature)
        gradient = out_gradient.to(wide).unsqueeze(1)
        dscaled = -torch.exp(scaled - normaliser.unsqueeze(1)) * gradient
        local = targets - ctx.first
        owned = ((local >= 0) & (local < columns)).to(wide).unsqueeze(1)
        # One index a row, so that nothing is added in an order of the hardware's choosing.
        index = local.clamp(0, columns - 1).unsqueeze(1)
        dscaled.scatter_(1, index, dscaled.gather(1, index) + gradient * owned)
        # Padding columns are in no softmax, so nothing flows into their rows of the table.
        dscaled[:, max(0, ctx.vocab_size - ctx.first) :] = 0.0
        dlogits = (dscaled / temperature.to(wide)).to(logits.dtype)
        return dlogits, None, None, None, None, None


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    *,
    vocabulary: VocabularySegments,
    order: str,
    ranks: RankGroup = RankGroup(),
) -> torch.Tensor:
    """Logprobs of `targets` under softmax(logits / temperature), the same on every rank.

    logits: [rows, columns] as the lm_head left them, this rank's equal share of the padded table;
    targets: [rows] int64, real token ids; temperature: fp32, a scalar tensor or [rows, 1]; order:
    the contract's `segments` or `gather`. Returns [rows] fp32. The loss after it is computed on
    every rank, so each rank's gradient is its own columns', with no sum over ranks.
    """
    return apply(_TokenLogprobs, logits, targets, temperature, vocabulary, order, ranks)
