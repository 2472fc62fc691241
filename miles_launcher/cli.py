"""`miles`: plan, launch, parity, bisect, conform, contracts, profiles, doctor.

Typer and the standard library are all that `--help` loads; Hydra and Rich come with the command
that needs them, torch, Ray, SGLang and Megatron only once a run starts. Exit codes: 0 exact,
2 usage or configuration, 3 the gate closed, a divergence or a failed op, 4 a process died.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from .plan import LaunchPlan
    from .resolve import LaunchArgs

EXIT_CONFIGURATION = 2

app = typer.Typer(
    name="miles",
    help="True on-policy RL: the rollout's logprobs and the trainer's, equal bit for bit.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Argument(help="A name from `miles profiles`, in any case.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings, such as run.temperature=0.7."),
]
Tp = Annotated[int | None, typer.Option("--tp", help="Tensor parallel, both sides.")]
RolloutTp = Annotated[int | None, typer.Option("--rollout-tp", help="Of the rollout alone.")]
TrainTp = Annotated[int | None, typer.Option("--train-tp", help="Of the trainer alone.")]
Pp = Annotated[int | None, typer.Option("--pp", help="Pipeline stages of the trainer.")]
Cp = Annotated[int | None, typer.Option("--cp", help="Context parallel (Ulysses), trainer.")]
Contract = Annotated[
    str | None,
    typer.Option("--contract", help="A name from `miles contracts`, or off (a control)."),
]
Segments = Annotated[
    int | None,
    typer.Option("--segments", help="K segments; default: the larger tensor-parallel degree."),
]
DeviceName = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")]
ModelPath = Annotated[
    Path | None,
    typer.Option("--model-path", help="A Hugging Face folder; default: seeded weights."),
]
Prompts = Annotated[str | None, typer.Option("--prompts", help="A JSONL file of prompts.")]
RewardName = Annotated[str | None, typer.Option("--reward", help="module:function.")]
Steps = Annotated[int | None, typer.Option("--steps", help="Training steps.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for the plan and the report.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]
Fault = Annotated[
    str | None,
    typer.Option(
        "--inject-fault",
        help="SIDE:LAYER:OP[:RANK[:TOKEN]], one ulp that must close the gate.",
    ),
]
BisectOnMismatch = Annotated[
    bool,
    typer.Option("--bisect-on-mismatch", help="Where the gate closes over a token, find the op."),
]
RequireCertificate = Annotated[
    Path | None,
    typer.Option("--require-certificate", help="What `miles conform` wrote: refuse without it."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Write the plan, show it and stop.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")]


def _fail(error: Exception) -> NoReturn:
    from rich.console import Console

    from .layout import LayoutError

    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    if isinstance(error, LayoutError):
        console.print("error: impossible layout", style="bold red")
        for violation in error.violations:
            console.print(f"  - {violation}")
    else:
        console.print(f"error: {error}", style="bold red")
    raise typer.Exit(EXIT_CONFIGURATION)


def _resolve(args: LaunchArgs) -> LaunchPlan:
    """The plan, or a compact message and exit code 2."""
    from .resolve import resolve

    try:
        return resolve(args)
    except ValueError as error:
        _fail(error)


@app.command()
def plan(
    model: Model,
    overrides: Overrides = None,
    tp: Tp = None,
    rollout_tp: RolloutTp = None,
    train_tp: TrainTp = None,
    pp: Pp = None,
    cp: Cp = None,
    contract: Contract = None,
    segments: Segments = None,
    device: DeviceName = None,
    model_path: ModelPath = None,
    prompts: Prompts = None,
    reward: RewardName = None,
    steps: Steps = None,
    out: Out = None,
    resume: Resume = False,
    inject_fault: Fault = None,
    require_certificate: RequireCertificate = None,
    as_json: AsJson = False,
) -> None:
    """Show the resolved plan; nothing is written or started."""
    from .resolve import LaunchArgs

    resolved = _resolve(
        LaunchArgs(
            model=model,
            require_certificate=require_certificate,
            tp=tp,
            rollout_tp=rollout_tp,
            train_tp=train_tp,
            pp=pp,
            cp=cp,
            contract=contract,
            segments=segments,
            device=device,
            model_path=model_path,
            prompts=prompts,
            reward=reward,
            steps=steps,
            out=out,
            resume=resume,
            inject_fault=inject_fault,
            overrides=tuple(overrides or ()),
        )
    )
    if as_json:
        sys.stdout.write(resolved.to_json())
        return
    from .show import show_plan

    show_plan(resolved)


@app.command()
def launch(
    model: Model,
    overrides: Overrides = None,
    tp: Tp = None,
    rollout_tp: RolloutTp = None,
    train_tp: TrainTp = None,
    pp: Pp = None,
    cp: Cp = None,
    contract: Contract = None,
    segments: Segments = None,
    device: DeviceName = None,
    model_path: ModelPath = None,
    prompts: Prompts = None,
    reward: RewardName = None,
    steps: Steps = None,
    out: Out = None,
    resume: Resume = False,
    inject_fault: Fault = None,
    bisect_on_mismatch: BisectOnMismatch = False,
    dry_run: DryRun = False,
    require_certificate: RequireCertificate = None,
) -> None:
    """Sample, score, compare, train, sync: every step gated on exact equality."""
    from .resolve import LaunchArgs

    _start(
        LaunchArgs(
            model=model,
            require_certificate=require_certificate,
            tp=tp,
            rollout_tp=rollout_tp,
            train_tp=train_tp,
            pp=pp,
            cp=cp,
            contract=contract,
            segments=segments,
            device=device,
            model_path=model_path,
            prompts=prompts,
            reward=reward,
            steps=steps,
            out=out,
            resume=resume,
            inject_fault=inject_fault,
            overrides=tuple(overrides or ()),
        ),
        dry_run=dry_run,
        parity_only=False,
        bisect_on_mismatch=bisect_on_mismatch,
    )


@app.command()
def parity(
    model: Model,
    overrides: Overrides = None,
    tp: Tp = None,
    rollout_tp: RolloutTp = None,
    train_tp: TrainTp = None,
    pp: Pp = None,
    cp: Cp = None,
    contract: Contract = None,
    segments: Segments = None,
    device: DeviceName = None,
    model_path: ModelPath = None,
    prompts: Prompts = None,
    steps: Steps = None,
    out: Out = None,
    inject_fault: Fault = None,
    bisect_on_mismatch: BisectOnMismatch = False,
    dry_run: DryRun = False,
    require_certificate: RequireCertificate = None,
) -> None:
    """Sample and score only: the comparison without training."""
    from .resolve import LaunchArgs

    typed = tuple(overrides or ())
    if not any(text.startswith("run=") for text in typed):
        typed = ("run=parity", *typed)
    _start(
        LaunchArgs(
            model=model,
            tp=tp,
            rollout_tp=rollout_tp,
            train_tp=train_tp,
            pp=pp,
            cp=cp,
            contract=contract,
            segments=segments,
            device=device,
            model_path=model_path,
            prompts=prompts,
            steps=steps,
            out=out,
            inject_fault=inject_fault,
            require_certificate=require_certificate,
            overrides=typed,
        ),
        dry_run=dry_run,
        parity_only=True,
        bisect_on_mismatch=bisect_on_mismatch,
    )


@app.command()
def bisect(
    model: Annotated[
        str | None, typer.Argument(help="A name from `miles profiles`; none with --replay.")
    ] = None,
    overrides: Overrides = None,
    tp: Tp = None,
    rollout_tp: RolloutTp = None,
    train_tp: TrainTp = None,
    pp: Pp = None,
    cp: Cp = None,
    contract: Contract = None,
    segments: Segments = None,
    device: DeviceName = None,
    model_path: ModelPath = None,
    prompts: Prompts = None,
    out: Out = None,
    inject_fault: Fault = None,
    between: Annotated[
        str, typer.Option("--between", help="rollout,trainer or decode,prefill (the engine alone).")
    ] = "rollout,trainer",
    replay: Annotated[
        Path | None,
        typer.Option("--replay", help="The folder of a run whose gate closed: that very batch."),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep", help="both, or one side: inject a fault at each tap; all must be named."
        ),
    ] = None,
    require_certificate: RequireCertificate = None,
    dry_run: DryRun = False,
) -> None:
    """Name the first op and token at which two sides differ, one batch, every op."""
    from .bisection import bisection_plan
    from .resolve import LaunchArgs

    args = LaunchArgs(
        model=model or "",
        tp=tp,
        rollout_tp=rollout_tp,
        train_tp=train_tp,
        pp=pp,
        cp=cp,
        contract=contract,
        segments=segments,
        device=device,
        model_path=model_path,
        prompts=prompts,
        out=out,
        inject_fault=inject_fault,
        require_certificate=require_certificate,
        overrides=tuple(overrides or ()),
    )
    try:
        resolved, sides, swept = bisection_plan(args, between, replay, sweep)
    except ValueError as error:
        _fail(error)
    path = _written(resolved, dry_run)
    if path is None:
        return
    from .runtime.bisect import BisectOptions, run_bisect

    gc.enable()
    sys.exit(run_bisect(path, BisectOptions(between=sides, replay=replay, sweep=swept)))


def _written(resolved: LaunchPlan, dry_run: bool) -> Path | None:
    """The path of the written plan; None where it was only to be shown."""
    from . import plan as plans

    try:
        path = plans.write(resolved, Path(resolved.paths.out))
    except (ValueError, OSError) as error:
        _fail(error)
    if not dry_run:
        return path
    from .show import show_plan

    show_plan(resolved)
    typer.echo(f"plan written to {path}")
    return None


def _start(args: LaunchArgs, *, dry_run: bool, parity_only: bool, bisect_on_mismatch: bool) -> None:
    from .rewards import load_reward

    resolved = _resolve(args)
    if not (dry_run or parity_only):
        try:
            # A reward that cannot be loaded must not cost the start of an engine.
            load_reward(resolved.paths.reward)
        except (ValueError, OSError) as error:
            _fail(error)
    path = _written(resolved, dry_run)
    if path is None:
        return
    from .runtime.driver import run_launch

    gc.enable()
    sys.exit(run_launch(path, parity_only, bisect_on_mismatch))


@app.command()
def conform(
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    op: Annotated[
        list[str] | None, typer.Option("--op", help="An op of the suite; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the certificate.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: minutes less, and certifies nothing.")
    ] = False,
) -> None:
    """Check every op against an independent oracle on this device, and write a certificate."""
    from .conformance.run import conform as run
    from .conformance.table import RichView

    gc.enable()
    try:
        code = run(device=device, ops=op or (), out=out, quick=quick, view=RichView())
    except ValueError as error:
        _fail(error)
    raise typer.Exit(code)


@app.command()
def contracts() -> None:
    """List the contracts."""
    from .show import show_contracts

    show_contracts()


@app.command()
def profiles() -> None:
    """List the models."""
    from .show import show_profiles

    show_profiles()


@app.command()
def doctor() -> None:
    """Check versions, devices, and that every hook target is found and unchanged."""
    from .doctor import examine
    from .show import show_checks

    checks = examine()
    show_checks(checks)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def main() -> None:
    """The console script."""
    # Planning allocates much and frees little: collecting cycles takes a third of its time.
    gc.disable()
    app()


if __name__ == "__main__":
    main()
