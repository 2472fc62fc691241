"""Forward and backward over micro-batches, through megatron's own pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from megatron_patch import cpu_platform
from megatron_patch.ops import RankGroup, gather_ranks
from megatron_patch.parallel import MicroBatch, pack
from megatron_patch.taps import announce

from .batch import Batch
from .grpo import clipped_policy_loss
from .trainer_config import TrainerRankConfig


class PolicySteps:
    """Runs a policy model: micro-batches of packed sequences in, logprobs out."""

    def __init__(self, model: Any, config: TrainerRankConfig, device: torch.device) -> None:
        self.model, self.config, self.device = model, config, device
        self.context = RankGroup.of(parallel_state.get_context_parallel_group())
        self.sequences_per_micro_batch = config.micro_batch_size
        self.tokens_per_micro_batch = config.micro_batch_tokens

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """[rows] fp32 on the last stage, what the next stage needs elsewhere."""
        with cpu_platform.suspended():
            announce(batch)
            return self.model.packed_forward(batch)

    def micro_batches(
        self, batch: Batch, temperature: float, sequences: int | None = None
    ) -> list[MicroBatch]:
        """The batch as this context-parallel rank's micro-batches, in order. sequences: how many
        each, where not as configured."""
        if sequences is None:
            spans = batch.spans(self.sequences_per_micro_batch, self.tokens_per_micro_batch)
        else:
            spans = batch.spans(sequences)
        return [
            pack(
                batch.tokens[start:stop],
                batch.prompt_lengths[start:stop],
                temperature=temperature,
                device=self.device,
                cp_size=self.context.size,
                cp_rank=self.context.rank,
                first_sequence=start,
            )
            for start, stop in spans
        ]

    def _schedule(
        self,
        ddp: torch.nn.Module,
        micro: list[MicroBatch],
        finish: Callable[[int, MicroBatch, torch.Tensor], Any],
        forward_only: bool,
    ) -> list[Any]:
        """What `finish(number, micro-batch, logprobs)` returned for each, on the last stage."""

        def forward_step(batches: Iterator[tuple[int, MicroBatch]], _: Any) -> tuple[Any, Any]:
            number, batch = next(batches)
            out = self.logprobs(batch)
            return out, lambda output, non_loss_data=False: finish(number, batch, output)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(enumerate(micro)),
            model=[ddp],
            num_microbatches=len(micro),
            # Only a first guess of the shapes between stages; they tell each other the real ones.
            seq_length=micro[0].tokens.shape[0] * self.context.size,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _from_last_stage(self, x: torch.Tensor) -> torch.Tensor:
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            dist.broadcast(
                x,
                src=parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        return x

    def score(
        self,
        ddp: torch.nn.Module,
        batch: Batch,
        temperature: float,
        sequences: int | None = None,
    ) -> torch.Tensor:
        """Logprobs of all response tokens of the batch in order, [tokens] fp32, on every rank.
        sequences: how many a micro-batch, where not the configured number."""
        micro = self.micro_batches(batch, temperature, sequences)
        starts = np.cumsum([0, *(m.total_scored for m in micro)])
        values = torch.zeros(int(starts[-1]), dtype=torch.float32, device=self.device)
        mine = torch.zeros_like(values, dtype=torch.uint8)

        def finish(number: int, part: MicroBatch, output: torch.Tensor) -> None:
            where = part.places[: part.num_scored] + int(starts[number])
            values[where] = output[: part.num_scored].float()
            mine[where] = 1

        self._schedule(ddp, micro, finish, forward_only=True)
        if self.context.size > 1 and parallel_state.is_pipeline_last_stage():
            # Each token was scored by one context-parallel rank: copied from it, not summed.
            owned = torch.stack(gather_ranks(mine, self.context)).argmax(dim=0)
            everyone = torch.stack(gather_ranks(values, self.context))
            values = everyone.gather(0, owned.unsqueeze(0)).squeeze(0)
        return self._from_last_stage(values)

    def train(
        self,
        ddp: torch.nn.Module,
        batch: Batch,
        advantages: np.ndarray,
        old: np.ndarray,
        temperature: float,
        clip_eps: float,
    ) -> dict[str, float]:
        """Accumulate the gradients of the loss in megatron's buffers, divided by the number of
        response tokens. advantages, old: [tokens] fp32, per response token of the batch."""
        micro = self.micro_batches(batch, temperature)
        starts = np.cumsum([0, *(m.total_scored for m in micro)])
        advantage_of = torch.from_numpy(advantages).to(self.device)
        old_of = torch.from_numpy(old).to(self.device)
        # loss sum, clipped tokens, tokens, entropy; the largest difference apart, for it is no sum.
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        largest = torch.zeros(1, dtype=torch.float64, device=self.device)

        def finish(number: int, part: MicroBatch, output: torch.Tensor) -> tuple[Any, ...]:
            new = output[: part.num_scored]
            where = part.places[: part.num_scored] + int(starts[number])
            loss, clipped = clipped_policy_loss(new, old_of[where], advantage_of[where], clip_eps)
            if part.num_scored == 0:
                # Nothing to learn here, but this rank still takes part in every exchange.
                loss = output.sum() * 0.0
            else:
                largest.copy_(torch.maximum(largest, (new - old_of[where]).detach().abs().max()))
            counts = torch.tensor([float(clipped), float(part.num_scored)], dtype=torch.float64)
            entropy = self._entropy(part).to(sums.device).view(1)
            sums.add_(torch.cat([loss.detach().double().view(1), counts.to(sums.device), entropy]))
            tokens = torch.tensor(part.num_scored, dtype=torch.int, device=self.device)
            return loss, tokens, {}

        self._schedule(ddp, micro, finish, forward_only=False)
        if self.context.size > 1:
            sums = torch.stack(gather_ranks(sums, self.context)).sum(0)
            largest = torch.stack(gather_ranks(largest, self.context)).amax(0)
        everything = self._from_last_stage(torch.cat([sums, largest])).tolist()
        loss, clipped, tokens, entropy, diff = everything
        assert tokens == batch.num_response_tokens, (tokens, batch.num_response_tokens)
        result = {
            "loss": loss / tokens,
            "clip_fraction": clipped / tokens,
            "num_tokens": tokens,
            "max_abs_logprob_diff": diff,
        }
        return {**result, "entropy": entropy / tokens} if self.config.entropy else result

    def _entropy(self, part: MicroBatch) -> torch.Tensor:
        """Sum over the scored rows of the micro-batch whose logprobs were just computed."""
        rows = self.model.output_layer.entropy if self.config.entropy else None
        if rows is None:
            return torch.zeros((), dtype=torch.float64)
        total: torch.Tensor = rows[: part.num_scored].double().sum()
        return total


class StockSteps(PolicySteps):
    """The control: megatron's own model, one sequence at a time, and a plain log-softmax."""

    def __init__(self, model: Any, config: TrainerRankConfig, device: torch.device) -> None:
        super().__init__(model, config, device)
        # The local attention layer of megatron takes no packed sequences.
        self.sequences_per_micro_batch, self.tokens_per_micro_batch = 1, 0

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        out = self.model(
            input_ids=batch.tokens.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            attention_mask=None,
        )
        if not parallel_state.is_pipeline_last_stage():
            return out
        rows = gather_from_tensor_model_parallel_region(out[0].index_select(0, batch.scored))
        scaled = rows[:, : self.config.vocab_size].float() / batch.temperature
        return torch.log_softmax(scaled, dim=-1).gather(1, batch.targets.unsqueeze(1)).squeeze(1)
