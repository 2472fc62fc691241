"""One step after another: sample, reward, score, gate, train, sync."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..mismatch import WEIGHTS_FOLDER, write_mismatch
from ..parity.compare import as_logprobs, compare
from ..parity.gate import GateClosed, check_hook_calls, check_tokens
from ..parity.report import Report, StepReport
from ..plan import LaunchPlan
from ..prompts import Prompt, read_prompts
from ..rewards import BUILTIN, Reward, RewardSample, load_reward, score
from ..tasks import TASKS
from .advantages import group_advantages
from .batch import Batch
from .checkpoints import checkpoint_folder, finish_checkpoint
from .cluster import ProcessDied
from .events import StepEvents
from .progress import Progress
from .rollout import Generation
from .session import Session
from .tokens import Tokenization


class Loop:
    """The steps of one run. `parity_only`: no reward, no training; the comparison alone."""

    def __init__(
        self,
        plan: LaunchPlan,
        session: Session,
        report: Report,
        progress: Progress,
        model_path: Path,
        *,
        parity_only: bool,
    ) -> None:
        self._plan, self._session = plan, session
        self._report, self._progress = report, progress
        self._parity_only = parity_only
        self._out = Path(plan.paths.out)
        # Where the weights lie that both sides hold; None once training has changed them.
        self._weights: Path | None = model_path
        self._tokens = Tokenization(model_path)
        self._prompts = load_prompts(plan)
        self._ids = [self._tokens.encode(prompt) for prompt in self._prompts]
        self._reward: Reward | None = None if parity_only else load_reward(plan.paths.reward)
        self._check_lengths()

    @property
    def context_length(self) -> int:
        """Tokens that the engine takes, prompt and response."""
        return int(self._plan.rollout.engine_kwargs["context_length"])

    def _check_lengths(self) -> None:
        context = self.context_length
        room = context - self._plan.run.max_new_tokens
        for prompt, ids in zip(self._prompts, self._ids, strict=True):
            if len(ids) > room:
                raise ValueError(
                    f"{prompt.source}: {len(ids)} prompt tokens, room for {room} beside the "
                    "response; raise rollout.context_length or lower run.max_new_tokens"
                )

    def run(self, events: StepEvents) -> None:
        """All steps from the first that the report does not hold yet."""
        for number in range(len(self._report.steps), self._plan.run.steps):
            step = StepReport(step=number)
            try:
                self._step(step)
                step.complete = True
            finally:
                # Also after a closed gate: what was found is the point of the report.
                if step.compared:
                    events.write(step)
                self._report.write(self._out)
            self._progress.step_done(step)

    def sample(
        self, step: int, request_ids: Callable[[int], str] | None = None
    ) -> tuple[list[int], list[Generation], Batch]:
        """The prompt numbers of a step, their responses, and both together. The same step samples
        the same tokens again. request_ids: the name of each sequence's request."""
        chosen = self._choose(step)
        prompts = [self._ids[index] for index in chosen]
        names = None if request_ids is None else [request_ids(i) for i in range(len(chosen))]
        generations = self._session.generate(prompts, self._sampling(step, len(chosen)), names)
        return chosen, generations, _batch(prompts, generations)

    def _step(self, step: StepReport) -> None:
        run, session, phase = self._plan.run, self._session, self._progress.phase
        with phase(f"step {step.step}: rollout", step.seconds, "rollout"):
            chosen, generations, batch = self.sample(step.step)
        rewards: list[float] = []
        if self._reward is not None:
            with phase(f"step {step.step}: reward", step.seconds, "reward"):
                rewards = score(self._reward, self._samples(chosen, generations))
                step.reward_mean = sum(rewards) / len(rewards)
        with phase(f"step {step.step}: trainer logprobs", step.seconds, "score"):
            scores = session.score(batch)
        with phase(f"step {step.step}: gate", step.seconds, "gate"):
            rollout = rollout_logprobs(generations)
            self._gate(step, batch, generations, rollout, scores)
        if self._parity_only:
            step.weights_digest = dict(session.digests())
            return
        with phase(f"step {step.step}: train", step.seconds, "train"):
            result = session.train(
                batch, group_advantages(rewards, run.samples_per_prompt), rollout
            )
            self._weights = None
            step.loss, step.grad_norm = result["loss"], result["grad_norm"]
            step.entropy = result.get("entropy")
        with phase(f"step {step.step}: weight sync", step.seconds, "sync"):
            session.sync_weights()
        with phase(f"step {step.step}: weights digest", step.seconds, "digest"):
            step.weights_digest = dict(session.digests())
        if self._due(step.step):
            with phase(f"step {step.step}: checkpoint", step.seconds, "checkpoint"):
                folder = checkpoint_folder(self._out, step.step + 1)
                session.save(folder)
                finish_checkpoint(folder)

    def _due(self, step: int) -> bool:
        every = self._plan.run.checkpoint_every
        if every < 0:
            return False
        return step + 1 == self._plan.run.steps or (every > 0 and (step + 1) % every == 0)

    def _gate(
        self,
        step: StepReport,
        batch: Batch,
        generations: Sequence[Generation],
        rollout: Sequence[Any],
        scores: Sequence[Any],
    ) -> None:
        try:
            found = compare(rollout, scores, [g.response_ids for g in generations])
        except ValueError as error:
            raise GateClosed(f"the two sides cannot be compared: {error}") from None
        # From here on the step has something to say, whatever becomes of it.
        self._report.steps.append(step)
        step.compared = True
        step.compared_tokens = found.compared_tokens
        step.mismatched_tokens = found.mismatched_tokens
        step.max_abs_diff = found.max_abs_diff
        step.mismatches = [asdict(mismatch) for mismatch in found.first]
        try:
            check_tokens(found)
        except GateClosed as closed:
            try:
                self._keep_batch(step, batch, rollout, scores)
            except (OSError, ValueError, ProcessDied) as failure:
                # What the gate saw is the end of this run, not the full disk after it.
                raise GateClosed(f"{closed}; the batch could not be kept: {failure}") from closed
            raise
        if self._session.patched:
            check_hook_calls(
                self._session.rollout_readbacks(),
                qk_layernorm=self._plan.model.qk_layernorm,
                attention_ours=self._plan.policy.attention_backend != "fa3",
            )

    def _keep_batch(
        self, step: StepReport, batch: Batch, rollout: Sequence[Any], scores: Sequence[Any]
    ) -> None:
        weights = self._weights
        if weights is None:
            weights = self._out / WEIGHTS_FOLDER
            # Of an earlier start of this run, which a resumed one replaces.
            shutil.rmtree(weights, ignore_errors=True)
            with self._progress.phase("keeping the weights", step.seconds, "keep"):
                self._session.save_weights(weights)
        write_mismatch(self._out, step.step, asdict(batch), (rollout, scores), weights)

    def _choose(self, step: int) -> list[int]:
        """Prompt numbers of a step, each repeated for its samples: the file's order, around."""
        run = self._plan.run
        first = step * run.prompts_per_step
        numbers = [(first + i) % len(self._ids) for i in range(run.prompts_per_step)]
        return [number for number in numbers for _ in range(run.samples_per_prompt)]

    def _sampling(self, step: int, count: int) -> list[dict[str, Any]]:
        run = self._plan.run
        shared = {
            "temperature": run.temperature,
            "top_p": run.top_p,
            "top_k": run.top_k,
            "min_p": run.min_p,
            "repetition_penalty": run.repetition_penalty,
            "frequency_penalty": run.frequency_penalty,
            "presence_penalty": run.presence_penalty,
            "max_new_tokens": run.max_new_tokens,
        }
        # Every request of a run has its own noise, the same in every run of the same seed.
        base = run.seed * 1_000_003 + step * count
        return [{**shared, "sampling_seed": (base + i) & 0x7FFFFFFF} for i in range(count)]

    def _samples(
        self, chosen: Sequence[int], generations: Sequence[Generation]
    ) -> list[RewardSample]:
        samples = []
        for index, generation in zip(chosen, generations, strict=True):
            prompt = self._prompts[index]
            samples.append(
                RewardSample(
                    prompt=prompt.text or self._tokens.decode(self._ids[index]),
                    prompt_ids=self._ids[index],
                    response=self._tokens.decode(generation.response_ids),
                    response_ids=generation.response_ids,
                    label=prompt.label,
                    metadata=prompt.metadata,
                )
            )
        return samples


def load_prompts(plan: LaunchPlan) -> tuple[Prompt, ...]:
    """The run's prompts: a built-in task's, or a file's."""
    if plan.paths.prompts.startswith(BUILTIN):
        return TASKS[plan.paths.prompts.removeprefix(BUILTIN)].prompts
    return read_prompts(Path(plan.paths.prompts))


def rollout_logprobs(generations: Sequence[Generation]) -> list[Any]:
    """Per sequence the fp32 logprobs of its response; `GateClosed` where one is not fp32."""
    try:
        return [as_logprobs(generation.logprobs) for generation in generations]
    except ValueError as error:
        raise GateClosed(f"rollout: {error}") from None


def _batch(prompts: Sequence[Sequence[int]], generations: Sequence[Generation]) -> Batch:
    return Batch(
        tokens=[
            [*prompt, *generation.response_ids]
            for prompt, generation in zip(prompts, generations, strict=True)
        ],
        prompt_lengths=[len(prompt) for prompt in prompts],
        response_lengths=[len(generation.response_ids) for generation in generations],
    )
