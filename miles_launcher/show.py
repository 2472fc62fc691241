"""Tables on a terminal: a plan, the contracts, the profiles, the doctor's findings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from .plan import LaunchPlan
from .profiles import PROFILES, ModelProfile
from .schema import CONTRACTS, DEFAULT_CONTRACT, get_contract
from .settings import TrainSettings

if TYPE_CHECKING:
    from .doctor import Check

_PIPED_WIDTH = 120


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        # A pipe has no width of its own; a fixed one keeps the rows whole and comparable.
        console = Console(highlight=False, width=_PIPED_WIDTH)
    return console


def _pairs(title: str, rows: Iterable[tuple[str, object]]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", show_header=False, box=None
    )
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in rows:
        table.add_row(f"  {key}", str(value))
    return table


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "''" if value == "" else str(value)


def _millions(profile: ModelProfile) -> str:
    count = profile.num_parameters
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def show_plan(plan: LaunchPlan) -> None:
    """Print everything that a run of this plan would switch on."""
    console = _console()
    for table in (
        _overview(plan),
        _row_sums(plan),
        _pairs("Sampling", _sampling(plan)),
        _pairs("Training", _training(plan)),
        _pairs("SGLang engine", _rendered(plan.rollout.engine_kwargs)),
        _pairs("SGLang environment", _rendered(plan.rollout.env)),
        _pairs(
            "Megatron",
            _rendered({**plan.trainer.config_kwargs, **plan.trainer.model_kwargs}),
        ),
        _pairs("Megatron environment", _rendered(plan.trainer.env)),
    ):
        console.print(table)
        console.print()


def _rendered(values: dict[str, Any]) -> list[tuple[str, str]]:
    return [(key, _short(value)) for key, value in values.items()]


def _overview(plan: LaunchPlan) -> Table:
    model, layout, policy, paths = plan.model, plan.layout, plan.policy, plan.paths
    contract = policy.contract
    if not policy.patched:
        contract = "off (control: stock kernels on both sides)"
    world = (
        f"{layout.train_tp} tp x {layout.pp} pp x {layout.cp} cp = {layout.train_world_size} ranks"
    )
    table = policy.vocabulary
    rows: list[tuple[str, object]] = [
        (
            "model",
            f"{model.name}: {_millions(model)} parameters, {model.num_hidden_layers} layers, "
            f"{model.num_attention_heads}/{model.num_key_value_heads} heads of {model.head_dim}",
        ),
        ("weights", paths.model_path + (" (seeded, made on demand)" if paths.seeded else "")),
        ("device", plan.device + (f", {plan.num_gpus} GPUs" if plan.num_gpus is not None else "")),
        ("contract", contract),
        ("segments", _segments(plan)),
        (
            "rollout",
            f"{_engines(plan)}{layout.rollout_tp} tp, {policy.attention_backend} attention",
        ),
        ("trainer", world),
        ("rank sums", _rank_sums(plan)),
        (
            "log-softmax",
            f"{table.order}: {table.vocab_size} columns in {table.num_segments} x {table.width}",
        ),
        ("prompts", paths.prompts),
        ("reward", paths.reward),
        ("out", paths.out),
    ]
    if plan.certificate is not None:
        rows.append(("certificate", f"{plan.certificate.path} ({plan.certificate.digest[:12]})"))
    if plan.fault is not None:
        rows.append(("fault", f"one ulp at {plan.fault.side} {plan.fault.place}"))
    return _pairs("Plan", rows)


def _rank_sums(plan: LaunchPlan) -> str:
    """How sums over tensor-parallel ranks will travel, as far as that is known before a start."""
    if max(plan.layout.rollout_tp, plan.layout.train_tp) == 1:
        return "none (one rank on each side)"
    if plan.device == "cpu":
        return "over the process group (ranks on cpu)"
    return (
        "over symmetric memory where a group's GPUs are on one host and linked by NVLink, else "
        "over its process group; each rank reports which"
    )


def _engines(plan: LaunchPlan) -> str:
    count = plan.engine.num_engines
    return f"{count} engines, each " if count > 1 else ""


def _segments(plan: LaunchPlan) -> str:
    """The number, and why it is the default where it is."""
    fewest = max(plan.layout.rollout_tp, plan.layout.train_tp)
    if get_contract(plan.policy.contract).row_linear.order != "segments":
        return f"{plan.segments}"
    if plan.segments != fewest:
        return f"{plan.segments} (the layout needs {fewest})"
    return f"{plan.segments} (the larger TP degree: the fewest, cheapest in prefill and training)"


def _row_sums(plan: LaunchPlan) -> Table:
    table = Table(title="Row-parallel sums", title_justify="left", title_style="bold", box=None)
    for name in (
        "  layer",
        "K",
        "path",
        "leaves",
        "carried in",
        "per rollout rank",
        "per trainer rank",
    ):
        table.add_column(
            name, header_style="cyan", justify="left" if name == "  layer" else "right"
        )
    for row in plan.policy.row_linears:
        table.add_row(
            f"  {row.layer}",
            str(row.k_global),
            row.path,
            str(row.num_leaves),
            row.leaf_dtype,
            str(row.rollout_leaves_per_rank),
            str(row.train_leaves_per_rank),
        )
    return table


def _sampling(plan: LaunchPlan) -> list[tuple[str, object]]:
    run = plan.run
    return [
        ("steps", run.steps),
        (
            "samples per step",
            f"{run.prompts_per_step} prompts x {run.samples_per_prompt} = {run.samples_per_step}",
        ),
        ("new tokens", f"up to {run.max_new_tokens}"),
        ("temperature", run.temperature),
        ("logprobs from", run.logprob_source),
        ("seed", run.seed),
    ]


def _training(plan: LaunchPlan) -> list[tuple[str, object]]:
    train = plan.training
    betas = ", ".join(map(str, train.adam_betas))
    return [
        ("optimizer", f"AdamW, lr {train.lr:g}, betas {betas}, eps {train.adam_eps:g}"),
        ("weight decay", f"{train.weight_decay:g}"),
        ("gradient clip", f"{train.clip_grad:g}"),
        ("micro batch", _micro_batch(train)),
        ("recompute", train.recompute),
        ("logits memory", f"{train.logits_memory_mb} MiB"),
        *([("entropy", "its mean, every step")] if train.entropy else []),
    ]


def _micro_batch(train: TrainSettings) -> str:
    if not train.micro_batch_tokens:
        return f"{train.micro_batch_size} sequences"
    return f"up to {train.micro_batch_size} sequences and {train.micro_batch_tokens} tokens"


def show_contracts() -> None:
    """Print every contract with its order, families and digest."""
    table = Table(box=None, title_justify="left")
    for name in ("contract", "order", "carried in", "families", "digest", "summary"):
        table.add_column(name, header_style="cyan", overflow="fold", no_wrap=name == "contract")
    for contract in CONTRACTS.values():
        default = " (default)" if contract.name == DEFAULT_CONTRACT else ""
        table.add_row(
            contract.name + default,
            contract.row_linear.order,
            contract.row_linear.leaf_dtype,
            ", ".join(contract.families),
            contract.digest()[:12],
            contract.summary,
        )
    _console().print(table)


def show_profiles() -> None:
    """Print every model with its shape and the contracts that cover its family."""
    table = Table(box=None)
    for name in (
        "model",
        "parameters",
        "layers",
        "hidden",
        "heads",
        "head dim",
        "mlp",
        "vocabulary",
    ):
        table.add_column(name, header_style="cyan", justify="left" if name == "model" else "right")
    table.add_column("tied head", header_style="cyan")
    table.add_column("contracts", header_style="cyan")
    for profile in PROFILES.values():
        covering = [
            name.rpartition("_")[2]
            for name, contract in CONTRACTS.items()
            if profile.family in contract.families
        ]
        table.add_row(
            profile.name,
            _millions(profile) if covering else "-",
            str(profile.num_hidden_layers),
            str(profile.hidden_size),
            f"{profile.num_attention_heads}/{profile.num_key_value_heads}",
            str(profile.head_dim),
            str(profile.intermediate_size),
            str(profile.vocab_size),
            "yes" if profile.tie_word_embeddings else "no",
            ", ".join(covering) or f"none covers {profile.family}",
        )
    _console().print(table)


def show_checks(checks: list[Check]) -> None:
    """Print the doctor's findings, one row each."""
    table = Table(box=None)
    for name in ("check", "result", "detail"):
        table.add_column(name, header_style="cyan", overflow="fold", no_wrap=name == "result")
    for check in checks:
        result = "[green]ok[/green]" if check.ok else "[bold red]broken[/bold red]"
        table.add_row(check.name, result, check.detail)
    _console().print(table)
