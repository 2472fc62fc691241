"""What a user may set, as frozen typed data: the schema of `conf/` and a part of the plan.

Hydra composes into these classes and refuses any key that is not here. Values that would make
the comparison of logprobs meaningless are present, so that they are refused with the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .layout import Layout

LOGPROB_SOURCES = ("decode",)
RECOMPUTE = ("none", "full")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION = ("auto", "fa3", "triton")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The profile's name, as `miles profiles` lists it, and the seed of its seeded weights."""

    name: str = "qwen3-tiny"
    weights_seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractSettings:
    """A registry name or `off`; `segments` None takes the larger of the two TP degrees."""

    name: str = "qwen3_dense_true_on_policy_v2"
    segments: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """One step: prompts, samples, and how tokens are drawn.

    `prompts` is `builtin:NAME` or a JSONL file, `reward` is `builtin:NAME` or `module:function`.
    `max_new_tokens` counts response tokens; the penalties and cut-offs are SGLang's.
    `require_certificate` is what `miles conform` wrote, a file or its folder.
    `checkpoint_every` counts steps; the last step is kept too, 0 keeps it alone, and -1 keeps
    nothing. A checkpoint is 2 bytes a parameter, and 12 more for the optimizer.
    """

    steps: int = 3
    seed: int = 0
    prompts_per_step: int = 4
    samples_per_prompt: int = 4
    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprob_source: str = "decode"
    prompts: str = "builtin:lowercase"
    reward: str = "builtin:lowercase"
    checkpoint_every: int = 0
    require_certificate: str | None = None

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """AdamW and the shape of a training step.

    A micro-batch packs at most `micro_batch_size` sequences and `micro_batch_tokens` tokens (0: any
    number), at least one sequence. No logprob's bit depends on it. `logits_memory_mb` (MiB) is
    what the logits and what is made of them may take: rows go through the head in chunks, forward
    and backward. `entropy` reports the policy's mean entropy a step.
    """

    lr: float = 1e-3
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    adam_betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    micro_batch_size: int = 4
    micro_batch_tokens: int = 0
    recompute: str = "none"
    logits_memory_mb: int = 256
    entropy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Sizes of the engine. None: derived from device and profile in `render.py`.

    `num_engines` data-parallel engines share a step's prompts, each with its own ranks.
    `stock_on_policy_target` is SGLang's own `rl_on_policy_target`, a control for contract `off`.
    `chunked_prefill_size` (tokens; -1 for none), `cuda_graph` and `radix_cache` have each changed
    a row's bits in some engine. Here they change none, so they are on; the gate judges every run.
    """

    num_engines: int = 1
    stock_on_policy_target: str | None = None
    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    max_running_requests: int = 64
    context_length: int | None = None
    chunked_prefill_size: int = 2048
    cuda_graph: bool = True
    radix_cache: bool = True
    log_level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Where it runs. `num_gpus` None: those visible here, or not counted when RAY_ADDRESS is set.

    `colocate`: rollout and trainer on the same GPUs. `start_timeout`: seconds until a rank that
    has not come up is reported.
    """

    num_gpus: int | None = None
    colocate: bool = True
    start_timeout: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All of them; the root of `conf/config.yaml`.

    `attention` is that of both sides on a GPU; `auto` takes FA3 on Hopper for heads of 128, else
    the Triton path. The two have different bits.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    layout: Layout = field(default_factory=Layout)
    contract: ContractSettings = field(default_factory=ContractSettings)
    device: str = "auto"
    attention: str = "auto"
    run: RunSettings = field(default_factory=RunSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)


# key, the only value that leaves the sampled distribution whole, what another value does to it
_NEUTRAL_SAMPLING: tuple[tuple[str, float, str], ...] = (
    ("top_p", 1.0, "renormalises over the nucleus"),
    ("top_k", -1, "renormalises over the k most likely tokens"),
    ("min_p", 0.0, "renormalises over the tokens above the threshold"),
    ("repetition_penalty", 1.0, "rescales the logits of tokens seen before"),
    ("frequency_penalty", 0.0, "shifts the logits of tokens seen before"),
    ("presence_penalty", 0.0, "shifts the logits of tokens seen before"),
)


def check_settings(settings: Settings) -> None:
    """Raise `ValueError` listing every value that is out of range or breaks parity."""
    problems = _sampling_problems(settings.run)
    problems += _range_problems(settings)
    if problems:
        raise ValueError("; ".join(problems))


def _sampling_problems(run: RunSettings) -> list[str]:
    problems = [
        f"run.{key}={getattr(run, key)} {effect}, so the engine samples from another distribution "
        f"than the trainer scores; parity needs run.{key}={neutral}"
        for key, neutral, effect in _NEUTRAL_SAMPLING
        if getattr(run, key) != neutral
    ]
    if not (math.isfinite(run.temperature) and run.temperature > 0):
        problems.append(
            f"run.temperature={run.temperature} must be a positive number: logprobs are those of "
            "logits / temperature, and greedy decoding has none to compare"
        )
    if run.logprob_source not in LOGPROB_SOURCES:
        problems.append(
            f"run.logprob_source={run.logprob_source!r}: choose from {', '.join(LOGPROB_SOURCES)}"
        )
    return problems


def _range_problems(settings: Settings) -> list[str]:
    run, train, rollout, cluster = settings.run, settings.train, settings.rollout, settings.cluster
    counts: list[tuple[str, float]] = [
        ("run.steps", run.steps),
        ("run.prompts_per_step", run.prompts_per_step),
        ("run.samples_per_prompt", run.samples_per_prompt),
        ("run.max_new_tokens", run.max_new_tokens),
        ("train.micro_batch_size", train.micro_batch_size),
        ("rollout.max_running_requests", rollout.max_running_requests),
        ("rollout.num_engines", rollout.num_engines),
        ("cluster.start_timeout", cluster.start_timeout),
    ]
    optional = [
        ("rollout.max_total_tokens", rollout.max_total_tokens),
        ("rollout.context_length", rollout.context_length),
    ]
    counts += [(key, value) for key, value in optional if value is not None]
    problems = [f"{key}={value} must be positive" for key, value in counts if not value > 0]
    reals = {f"train.{key}": getattr(train, key) for key in ("lr", "weight_decay", "clip_grad")}
    for key, value in reals.items():
        if not (math.isfinite(value) and value >= 0):
            problems.append(f"{key}={value} must be a finite number, 0 or more")
    if not train.adam_eps > 0:
        problems.append(f"train.adam_eps={train.adam_eps} must be positive")
    if not all(0 <= beta < 1 for beta in train.adam_betas):
        problems.append(f"train.adam_betas={list(train.adam_betas)} must both be in [0, 1)")
    if train.recompute not in RECOMPUTE:
        problems.append(f"train.recompute={train.recompute!r}: choose from {', '.join(RECOMPUTE)}")
    if train.logits_memory_mb < 1:
        problems.append(
            f"train.logits_memory_mb={train.logits_memory_mb}: must be at least 1 (MiB)"
        )
    fraction = rollout.mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        problems.append(f"rollout.mem_fraction_static={fraction} must be between 0 and 1")
    if rollout.chunked_prefill_size == 0 or rollout.chunked_prefill_size < -1:
        problems.append(
            f"rollout.chunked_prefill_size={rollout.chunked_prefill_size} must be positive, "
            "or -1 for none"
        )
    if run.checkpoint_every < -1:
        problems.append(
            f"run.checkpoint_every={run.checkpoint_every} must be 0 or more, or -1 for none"
        )
    if cluster.num_gpus is not None and cluster.num_gpus < 0:
        problems.append(f"cluster.num_gpus={cluster.num_gpus} must be 0 or more")
    if settings.device not in DEVICES:
        problems.append(f"device={settings.device!r}: choose from {', '.join(DEVICES)}")
    if settings.attention not in ATTENTION:
        problems.append(f"attention={settings.attention!r}: choose from {', '.join(ATTENTION)}")
    if rollout.num_engines > run.samples_per_step:
        problems.append(
            f"rollout.num_engines={rollout.num_engines} engines share the {run.samples_per_step} "
            "sequences of a step; one would have none"
        )
    if rollout.stock_on_policy_target is not None and settings.contract.name != "off":
        problems.append(
            f"rollout.stock_on_policy_target={rollout.stock_on_policy_target!r} is a control of "
            "stock engines: use it with --contract off, or leave it out"
        )
    if train.micro_batch_tokens < 0:
        problems.append(
            f"train.micro_batch_tokens={train.micro_batch_tokens} must be 0 (micro-batches by the "
            "number of sequences) or more"
        )
    by_sequences = train.micro_batch_size > 0 and train.micro_batch_tokens == 0
    if by_sequences and run.samples_per_step % train.micro_batch_size:
        problems.append(
            f"train.micro_batch_size={train.micro_batch_size} does not divide the "
            f"{run.prompts_per_step} x {run.samples_per_prompt} = {run.samples_per_step} sequences "
            "of a step"
        )
    return problems
