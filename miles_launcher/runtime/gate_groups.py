"""The gate's groups: batches through a running pair of engines and trainer, bits compared."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ..bisection import ENGINES
from ..gpu_gate.results import GroupResult
from ..gpu_gate.sizes import Sizes, prompt
from ..parity.bisect import Flow, compare_rows
from ..parity.compare import Comparison, compare
from ..parity.flow import Place, data_flow
from ..parity.gate import GateClosed, check_hook_calls
from ..parity.report import Report
from ..parity.rows import TokenSlots
from ..plan import LaunchPlan
from .batch import Batch
from .events import StepEvents
from .loop import Loop, rollout_logprobs
from .passes import Passes, side_sizes
from .progress import Progress
from .rollout import Generation
from .session import LOGS, Session
from .sweep import fault_text, first_token

_SEQUENCES = 8
_KEPT_MISMATCHES = 8
_DECODE = re.compile(r"Decode batch.*? graph: (True|False)")
_PREFILL = re.compile(r"Prefill batch.*?#new-token: (\d+)")


@dataclass(slots=True, kw_only=True)
class Pair:
    """The running system of one configuration, and how large its batches are."""

    session: Session
    plan: LaunchPlan
    sizes: Sizes
    report: Report
    progress: Progress
    weights: Path

    def prompt(self, length: int, *place: object) -> list[int]:
        """A prompt of `length` tokens; the same place, the same tokens."""
        return prompt(length, self.plan.model.vocab_size, *place)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        temperature: float = 1.0,
        first_seed: int = 1,
    ) -> tuple[list[Generation], Batch]:
        """One response of `new_tokens` tokens a prompt, sequence i with its own noise."""
        shared = {
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "max_new_tokens": new_tokens,
            # Counts must not depend on when random weights end a text.
            "ignore_eos": True,
        }
        sampling = [{**shared, "sampling_seed": first_seed + i} for i in range(len(prompts))]
        generations = self.session.generate(prompts, sampling)
        return generations, Batch(
            tokens=[[*p, *g.response_ids] for p, g in zip(prompts, generations, strict=True)],
            prompt_lengths=[len(p) for p in prompts],
            response_lengths=[len(g.response_ids) for g in generations],
        )

    def log(self, found: re.Pattern[str]) -> list[str]:
        """What a pattern finds in the engines' logs, so far."""
        folder = Path(self.plan.paths.out) / LOGS
        texts = [p.read_text(errors="replace") for p in sorted(folder.glob("rollout*.log"))]
        return [match for text in texts for match in found.findall(text)]


def run_group(name: str, pair: Pair) -> GroupResult:
    """One group to its end; what closes a gate inside it is a failure of the group."""
    result = GroupResult(name=name, control=name in CONTROLS)
    try:
        GROUPS[name](pair, result)
        if pair.session.patched and name != "bisect":
            check_hook_calls(
                pair.session.rollout_readbacks(),
                qk_layernorm=pair.plan.model.qk_layernorm,
                attention_ours=pair.plan.policy.attention_backend != "fa3",
            )
    except (GateClosed, ValueError) as error:
        result.failures.append(str(error))
    if not np.isfinite(float(result.max_abs_diff)):
        result.max_abs_diff = str(result.max_abs_diff)
    return result


def _add(result: GroupResult, found: Comparison) -> None:
    result.compared_tokens += found.compared_tokens
    result.mismatched_tokens += found.mismatched_tokens
    result.max_abs_diff = max(float(result.max_abs_diff), found.max_abs_diff)
    room = _KEPT_MISMATCHES - len(result.first_mismatches)
    result.first_mismatches += [
        {name: str(value) if isinstance(value, float) else value for name, value in kept.items()}
        for kept in map(asdict, found.first[: max(0, room)])
    ]


def _judge(result: GroupResult, generations: Sequence[Generation], scores: Sequence[Any]) -> None:
    """Count the tokens of one batch and one scoring of it."""
    rows = rollout_logprobs(generations)
    _add(result, compare(rows, scores, [g.response_ids for g in generations]))


def _digest(generations: Sequence[Generation]) -> str:
    digest = hashlib.sha256()
    for row, generation in zip(rollout_logprobs(generations), generations, strict=True):
        digest.update(np.asarray(generation.response_ids, dtype=np.int64).tobytes())
        digest.update(row.tobytes())
    return digest.hexdigest()


def _same(result: GroupResult, what: str, first: str, again: str) -> None:
    if first != again:
        result.failures.append(f"{what}: other tokens or logprobs than at first")


def _prompts(pair: Pair, result: GroupResult, temperature: float = 1.0) -> None:
    """Prompts of every length, each sampled `samples` times, in one call."""
    sizes = pair.sizes
    prompts = [
        pair.prompt(length, "prompts", length)
        for length in sizes.prompt_lengths
        for _ in range(sizes.samples)
    ]
    generations, batch = pair.sample(prompts, sizes.new_tokens, temperature)
    result.digest = _digest(generations)
    _judge(result, generations, pair.session.score(batch, temperature, _SEQUENCES))
    result.facts |= {"temperature": temperature, "prompt_tokens": sum(map(len, prompts))}
    _check_chunks(pair, result, max(map(len, prompts)))
    _check_graphs(pair, result)


def _check_chunks(pair: Pair, result: GroupResult, longest: int) -> None:
    """That prompts were cut as the configuration says, from what the engines logged."""
    pieces = [int(count) for count in pair.log(_PREFILL)]
    result.facts["largest_prefill_tokens"] = max(pieces, default=0)
    chunk = pair.plan.engine.chunked_prefill_size
    if chunk > 0 and longest > chunk and max(pieces, default=0) > chunk:
        result.failures.append(f"a prefill of {max(pieces)} tokens, chunks are of {chunk}")
    if chunk < 0 and max(pieces, default=0) < longest:
        result.failures.append(f"no prefill of {longest} tokens in one piece")


def _check_graphs(pair: Pair, result: GroupResult) -> None:
    """That decode was replayed from CUDA graphs where it has to be, and only there."""
    graphs = [text == "True" for text in pair.log(_DECODE)]
    result.facts["decode_log_lines"] = {"graph": sum(graphs), "eager": len(graphs) - sum(graphs)}
    if pair.plan.device != "cuda":
        return
    wanted = pair.plan.engine.cuda_graph
    if any(graphs) != wanted:
        result.failures.append(
            f"{sum(graphs)} of {len(graphs)} logged decode batches came from a CUDA graph; "
            f"{'some' if wanted else 'none'} had to"
        )


def _temperature(pair: Pair, result: GroupResult) -> None:
    """The same at 0.7."""
    _prompts(pair, result, 0.7)


def _micro_batches(pair: Pair, result: GroupResult) -> None:
    """One batch, scored in micro-batches of every size."""
    sizes = pair.sizes
    lengths = sizes.prompt_lengths[: len(sizes.prompt_lengths) // 2] * 2 * sizes.samples
    prompts = [pair.prompt(n, "micro", n, i) for i, n in enumerate(lengths)]
    generations, batch = pair.sample(prompts, max(1, sizes.new_tokens // 4))
    for sequences in sizes.micro_batches:
        scores = pair.session.score(batch, 1.0, sequences or len(batch))
        _judge(result, generations, scores)
    result.facts["micro_batches"] = [n or len(batch) for n in sizes.micro_batches]


def _cache(pair: Pair, result: GroupResult) -> None:
    """Prompts with a prefix that is found in the cache, then the same again, then after a flush:
    the same tokens and logprobs each time, and the trainer's, which knows no cache."""
    sizes, session = pair.sizes, pair.session
    shared = pair.prompt(max(sizes.hit_lengths) + 9, "shared")
    prompts = []
    for number, length in enumerate(sizes.hit_lengths):
        rest = pair.prompt(9 + number % 7, "rest", length)
        # The first token of its own is another one, so that the hit has exactly this length.
        rest[0] = (shared[length] + 1 + number) % pair.plan.model.vocab_size
        prompts.append([*shared[:length], *rest])
    session.flush_cache()
    pair.sample([shared] * max(1, pair.plan.engine.num_engines), 1, first_seed=9001)
    generations, batch = pair.sample(prompts, sizes.new_tokens)
    hits = [g.cached_tokens for g in generations]
    result.digest = _digest(generations)
    scores = session.score(batch, 1.0, _SEQUENCES)
    _judge(result, generations, scores)
    counts = {"warm": sum(hits)}
    for what in ("again", "after_flush"):
        if what == "after_flush":
            session.flush_cache()
        repeated, other = pair.sample(prompts, sizes.new_tokens)
        _same(result, what, result.digest, _digest(repeated))
        _judge(result, repeated, scores if other == batch else session.score(other, 1.0, 8))
        counts[what] = sum(g.cached_tokens for g in repeated)
    result.facts |= {"hit_lengths": list(sizes.hit_lengths), "cached_tokens": counts}
    if not pair.plan.engine.radix_cache:
        if any(counts.values()):
            result.failures.append(f"cached tokens without a prefix cache: {counts}")
    elif hits != list(sizes.hit_lengths):
        result.failures.append(f"cached tokens {hits}, expected {list(sizes.hit_lengths)}")


def _chunks(pair: Pair, result: GroupResult) -> None:
    """Prompts around the borders of prefill chunks, all at once and each alone."""
    sizes, session = pair.sizes, pair.session
    prompts = [pair.prompt(n, "chunks", n) for n in sizes.chunk_lengths]
    session.flush_cache()
    count = 2 * sizes.samples
    generations, batch = pair.sample(prompts * count, sizes.new_tokens)
    _judge(result, generations, session.score(batch, 1.0, _SEQUENCES))
    alone: list[Generation] = []
    for number, one in enumerate(prompts):
        session.flush_cache()
        alone += pair.sample([one], sizes.new_tokens, first_seed=1 + number)[0]
    _same(result, "alone", _digest(generations[: len(prompts)]), _digest(alone))
    again = Batch(
        tokens=[[*p, *g.response_ids] for p, g in zip(prompts, alone, strict=True)],
        prompt_lengths=[len(p) for p in prompts],
        response_lengths=[len(g.response_ids) for g in alone],
    )
    _judge(result, alone, session.score(again, 1.0, 1))
    _check_chunks(pair, result, max(sizes.chunk_lengths))


def _batch_sizes(pair: Pair, result: GroupResult) -> None:
    """As many requests at once as each of the sizes, scored together."""
    sizes = pair.sizes
    generations: list[Generation] = []
    batches: list[Batch] = []
    for size in sizes.batch_sizes:
        prompts = [pair.prompt(9 + i % 23, "sizes", size, i) for i in range(size)]
        found, batch = pair.sample(prompts, sizes.batch_new_tokens)
        generations += found
        batches.append(batch)
    together = Batch(
        tokens=[tokens for batch in batches for tokens in batch.tokens],
        prompt_lengths=[n for batch in batches for n in batch.prompt_lengths],
        response_lengths=[n for batch in batches for n in batch.response_lengths],
    )
    _judge(result, generations, pair.session.score(together, 1.0, 64))
    result.facts["batch_sizes"] = list(sizes.batch_sizes)


def _loop(pair: Pair, result: GroupResult, *, parity_only: bool) -> None:
    """The launcher's own loop; what it found goes into the group. Raises what the loop raises."""
    report = pair.report
    report.steps.clear()
    loop = Loop(
        pair.plan, pair.session, report, pair.progress, pair.weights, parity_only=parity_only
    )
    events = StepEvents(Path(pair.plan.paths.out))
    try:
        loop.run(events)
    finally:
        events.close()
        compared, mismatched, largest = report.totals()
        result.compared_tokens, result.mismatched_tokens = compared, mismatched
        result.max_abs_diff = largest
        result.facts["steps"] = [
            {"grad_norm": s.grad_norm, "weights": s.weights_digest, "seconds": s.seconds}
            for s in report.steps
        ]


def _training(pair: Pair, result: GroupResult) -> None:
    """The gradient of one batch with and without recomputation, then the training steps."""
    lengths = pair.sizes.gradient_lengths
    batch = Batch(
        tokens=[pair.prompt(n, "gradient", n, i) for i, n in enumerate(lengths)],
        prompt_lengths=[n // 2 for n in lengths],
        response_lengths=[n - n // 2 for n in lengths],
    )
    found = {
        name: pair.session.gradients(batch, 1.0, how)
        for name, how in (("full", "full"), ("none", "none"), ("again", "none"))
    }
    result.facts["grad_norm"] = found["full"]["grad_norm"]
    result.facts["gradient_digests"] = found["full"]["digests"]
    if not found["full"]["grad_norm"] > 0:
        result.failures.append(f"grad_norm is {found['full']['grad_norm']}")
    for name in ("none", "again"):
        if found[name] != found["full"]:
            result.failures.append(
                f"gradient with recompute {name}: {found[name]['grad_norm']!r}, "
                f"{found[name]['digests']}; with full: {found['full']['grad_norm']!r}"
            )
    _loop(pair, result, parity_only=False)
    seen = [step["weights"]["trainer"] for step in result.facts["steps"]]
    if len(set(seen)) != len(seen):
        result.failures.append("a training step changed no weight: syncing was not tested")


def _parity(pair: Pair, result: GroupResult) -> None:
    """A control: one step of the loop, in which tokens must differ."""
    try:
        _loop(pair, result, parity_only=True)
    except GateClosed as closed:
        if not result.mismatched_tokens:
            raise
        result.facts["gate"] = str(closed)[:400]


def _bisect(pair: Pair, result: GroupResult) -> None:
    """A control: one ulp in the trainer, in the middle of the model, which the comparison of every
    op must name: layer, op and token."""
    plan, session = pair.plan, pair.session
    loop = Loop(plan, session, pair.report, pair.progress, pair.weights, parity_only=True)
    passes = Passes(loop, session, 0, ENGINES)
    batch = passes.plain()
    flow = Flow(
        data_flow(plan.model.num_hidden_layers, plan.model.qk_layernorm),
        plan.model.num_hidden_layers,
        plan.model.qk_layernorm,
    )
    sizes = side_sizes(ENGINES, plan.layout)
    slots = TokenSlots(batch.tokens, batch.prompt_lengths)
    ours, theirs = passes.recorded()
    clean = compare_rows(ours, theirs, sizes, flow, slots)
    if clean.found is not None:
        raise GateClosed(f"without a fault the sides differ at {clean.found.place}")
    place = Place(plan.model.num_hidden_layers // 2, "down_proj")
    text = fault_text(place, sizes[1])
    scores, faulty = passes.scored(batch, fault=text)
    responses = [t[n:] for t, n in zip(batch.tokens, batch.prompt_lengths, strict=True)]
    _add(result, compare(passes.returned[0], scores, responses))
    found = compare_rows(ours, faulty, sizes, flow, slots).found
    token = first_token(place, faulty, sizes[1] - 1, slots)
    result.facts |= {"fault": f"trainer:{text}", "rows_compared": clean.rows}
    named = None if found is None else (found.place, found.position, found.sequence)
    result.facts["named"] = None if named is None else f"{named[0]} at {named[1:]}"
    if named != (place, *token) or found is None or not found.inputs_equal:
        result.failures.append(f"the fault at {place}, {token}, was named as {named}")


GROUPS: Mapping[str, Callable[[Pair, GroupResult], None]] = MappingProxyType(
    {
        "prompts": _prompts,
        "temperature": _temperature,
        "micro_batches": _micro_batches,
        "cache": _cache,
        "chunks": _chunks,
        "batch_sizes": _batch_sizes,
        "training": _training,
        "parity": _parity,
        "bisect": _bisect,
    }
)
CONTROLS = frozenset({"parity", "bisect"})
