"""The lm_head, temperature, log-softmax and gather as one function whose logits never exist whole.

Forward and backward go over the rows of hidden states in chunks, and over the columns of the
vocabulary in blocks (a contract's segments). Of a chunk's logits a few numbers a row are kept; they
are made again in backward, where one kernel turns them into their gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .. import faults, ops
from ..faults import entering, tap_value
from ..function import apply
from ..ops import RankGroup, gather_ranks
from ..ops.formats import accumulator_dtype, rounded_dtype
from ..schema import VocabularySegments
from .chunks import Chunk, chunk
from .products import (
    add_weight_gradient,
    block_count,
    on_tensor_cores,
    op_calls,
    operand,
    parameter_gradient,
    product,
    tree,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """What the head computes, and in what memory.

    order: the contract's `segments` or `gather`; out_dtype: of the logits, `float32` or `bfloat16`;
    memory_bytes: what the logits, their gradient and the sums made of them may take, at least one
    row's.
    """

    vocabulary: VocabularySegments
    order: str
    out_dtype: str
    ranks: RankGroup = RankGroup()
    memory_bytes: int = 256 << 20
    entropy: bool = False


def _spans(total: int, step: int) -> list[slice]:
    """Consecutive ranges of at most `step`; one, empty, of nothing."""
    return [slice(start, min(start + step, total)) for start in range(0, max(1, total), step)]


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class _Head:
    """The local weight [columns, hidden], cut into `blocks` blocks of `width` columns of logits;
    `first` is its first column in the padded vocabulary."""

    def __init__(
        self, settings: HeadSettings, weight: torch.Tensor, temperature: torch.Tensor
    ) -> None:
        self.settings, self.weight, self.temperature = settings, weight, temperature
        size, rank = settings.ranks.size, settings.ranks.rank
        self.columns = weight.shape[0]
        self.first = rank * self.columns
        # The same blocks of the whole vocabulary at every degree: the contract's segments.
        self.blocks = block_count(self.columns * size, size) // size
        self.width = self.columns // self.blocks
        self.observed = faults.observed("lm_head", "temperature")

    def of(self, rows: slice) -> torch.Tensor:
        """The temperature of these rows."""
        return self.temperature[rows] if self.temperature.dim() else self.temperature

    def logits(self, x: torch.Tensor, blocks: slice) -> torch.Tensor:
        """[rows, columns of these blocks], as the contract leaves them."""
        w = self.weight
        if blocks.stop - blocks.start != self.blocks:
            w = w[blocks.start * self.width : blocks.stop * self.width]
        return ops.linear(x, w, out_dtype=self.settings.out_dtype)

    @property
    def logit_bytes(self) -> int:
        return rounded_dtype(self.weight.dtype, self.settings.out_dtype).itemsize

    def forward_chunk(self, rows: int) -> Chunk:
        memory, size, observed = self.settings.memory_bytes, self.settings.ranks.size, self.observed
        if self.settings.order == "segments" and not observed:
            each = self.logit_bytes * self.width
            return chunk(rows, self.blocks, row_bytes=0, block_bytes=each, memory_bytes=memory)
        # Whole local rows; observed, also divided and with a fault; all ranks' shards, joined.
        each = self.logit_bytes + (8 if observed else 0)
        if self.settings.order == "gather" and size > 1:
            each += 2 * size * (4 if observed else self.logit_bytes)
        each *= self.columns
        fits = chunk(rows, 1, row_bytes=each, block_bytes=0, memory_bytes=memory)
        return Chunk(fits.rows, self.blocks)

    def backward_chunk(self, rows: int, hidden: int) -> Chunk:
        # The input's gradient: a leaf, up to three waiting ones and a sum; then every rank's.
        wide = accumulator_dtype(self.weight.dtype).itemsize
        return chunk(
            rows,
            self.blocks,
            row_bytes=wide * hidden * (5 + self.settings.ranks.size),
            block_bytes=(self.logit_bytes + self.weight.itemsize) * self.width,
            memory_bytes=self.settings.memory_bytes,
        )

    def statistics(
        self, x: torch.Tensor, targets: torch.Tensor, rows: slice, blocks: slice
    ) -> tuple[torch.Tensor, ...]:
        """(largest, total, chosen, weighted) of some rows' segments among these blocks, or of all
        segments where the contract gathers the shards first."""
        settings = self.settings
        entering(None, "lm_head", x)
        logits = tap_value(None, "lm_head", self.logits(x, blocks))
        entering(None, "temperature", logits)
        temperature: torch.Tensor | None = self.of(rows)
        if self.observed:
            logits = ops.temperature_logits(logits, self.of(rows))
            temperature = None
        logits = tap_value(None, "temperature", logits)
        vocabulary = settings.vocabulary
        if settings.order == "gather":
            shards = gather_ranks(logits, settings.ranks)
            logits = shards[0] if len(shards) == 1 else torch.cat(shards, dim=-1)
            first, count = 0, vocabulary.num_segments
        else:
            first = settings.ranks.rank * self.blocks + blocks.start
            count = blocks.stop - blocks.start
            assert vocabulary.width == self.width, (vocabulary, self.width)
        return ops.token_statistics(
            logits, temperature, targets, vocabulary, first, count, entropy=settings.entropy
        )


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: torch.Tensor,
        settings: HeadSettings,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        op_calls[f"log_softmax:{settings.order}"] += 1
        head = _Head(settings, weight, temperature)
        at_once = head.forward_chunk(x.shape[0])
        parts = [
            [
                head.statistics(x[rows], targets[rows], rows, blocks)
                for blocks in _spans(head.blocks, at_once.blocks)
            ]
            for rows in _spans(x.shape[0], at_once.rows)
        ]
        # Blocks beside each other, then rows below each other: [rows, segments] each.
        largest, total, chosen, weighted = (
            _joined([_joined([block[i] for block in row], 1) for row in parts], 0) for i in range(4)
        )
        owner = torch.zeros_like(targets)
        if settings.order == "segments":
            owner = targets.div(settings.vocabulary.width, rounding_mode="floor")
            used = [largest, total, chosen] + ([weighted] if settings.entropy else [])
            if settings.ranks.size > 1:
                used = list(torch.cat(gather_ranks(torch.stack(used), settings.ranks), dim=-1))
            largest, total, chosen, weighted = *used[:3], used[-1]
        normaliser = ops.combine_segments(largest, total)
        entropy = None
        if settings.entropy:
            entropy = ops.combine_entropy(largest, total, weighted)
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(x, weight, targets, temperature, normaliser)
        ctx.settings = settings
        return chosen.gather(1, owner.unsqueeze(1)).squeeze(1) - normaliser, entropy

    @staticmethod
    def backward(ctx: Any, out_gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
        x, weight, targets, temperature, normaliser = ctx.saved_tensors
        settings: HeadSettings = ctx.settings
        head = _Head(settings, weight, temperature)
        gradient = out_gradient.to(accumulator_dtype(weight.dtype)).contiguous()
        at_once = head.backward_chunk(*x.shape)
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None

        def one_chunk(rows: slice, dweight: torch.Tensor | None) -> None:
            held: list[torch.Tensor] = []
            flat = operand(x[rows])

            def leaf(block: int) -> torch.Tensor:
                within = block % at_once.blocks
                if within == 0:
                    held.clear()
                    blocks = slice(block, block + at_once.blocks)
                    held.append(
                        ops.logits_gradient(
                            head.logits(x[rows], blocks),
                            head.of(rows),
                            targets[rows],
                            normaliser[rows],
                            gradient[rows],
                            first_column=head.first + block * head.width,
                            vocab_size=settings.vocabulary.vocab_size,
                            out_dtype=weight.dtype,
                        )
                    )
                dy = operand(held[0][:, within * head.width : (within + 1) * head.width])
                mine = slice(block * head.width, (block + 1) * head.width)
                if dweight is not None and on_tensor_cores(dy):
                    add_weight_gradient(dweight[mine], dy, flat)
                elif dweight is not None:
                    dweight[mine] += product(dy.t(), flat)
                if dx is None:
                    return dy.new_zeros(())
                return product(dy, operand(weight[mine]))

            total = tree(head.blocks, leaf)
            if dx is not None:
                dx[rows] = ops.tree_all_reduce(total, settings.ranks).to(x.dtype)

        def all_chunks(dweight: torch.Tensor | None) -> None:
            for rows in _spans(x.shape[0], at_once.rows):
                one_chunk(rows, dweight)

        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = parameter_gradient(weight, all_chunks)
        else:
            all_chunks(None)
        return dx, dweight, None, None, None


def head_logprobs(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    settings: HeadSettings,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logprobs of `targets` under softmax(x @ weight.T / temperature), the same on every rank.

    x: [rows, hidden] bf16, the same on every rank; weight: [columns, hidden] bf16, this rank's
    equal share of the padded table; targets: [rows] int64, real token ids; temperature: fp32, a
    scalar tensor or [rows, 1]. Returns ([rows] fp32, with `settings.entropy` the entropy of each
    row's softmax in nats, [rows] fp32 without a gradient, otherwise None). No bit of them depends
    on the chunk.

    Backward: the gradients of the logits are rounded to x's dtype, as every other activation's;
    the table's is added to fp32 chunk by chunk, the input's is summed over the ranks in fp32 as one
    tree over blocks of the padded vocabulary and rounded once. The loss after it is computed on
    every rank, so each rank's gradient is its own columns', with no sum over ranks.
    """
    return apply(_HeadLogprobs, x, weight, targets, temperature, settings)
