"""From what was typed to a validated plan. Reads headers and prompts; starts and writes nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import render
from .byte_tokenizer import NUM_TOKENS
from .checkpoint import check_weights, has_tokenizer
from .conf import compose_settings
from .conformance.requirement import CertificatePlan, require
from .devices import cpu_ids, host_facts, resolve_device, visible_gpus
from .faults import FaultPlan, parse_fault
from .layout import Layout, validate
from .plan import (
    PLAN_FILE,
    PLAN_VERSION,
    LaunchPlan,
    PathsPlan,
    RolloutPlan,
    TrainerPlan,
    check_out,
    read,
)
from .policy import (
    CONTRACT_OFF,
    Device,
    attention_path,
    check_family,
    effective_contract,
    kernel_policy,
    resolve_segments,
)
from .profiles import ModelProfile, check_same_shape, get_profile
from .prompts import check_prompts, read_prompts
from .rewards import BUILTIN, check_reward_name
from .schema import get_contract
from .seeded_weights import seeded_folder
from .settings import Settings, check_settings
from .tasks import TASKS


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchArgs:
    """The command line, before anything is derived; None: not given."""

    model: str
    tp: int | None = None
    rollout_tp: int | None = None
    train_tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    contract: str | None = None
    segments: int | None = None
    device: str | None = None
    model_path: Path | None = None
    prompts: str | None = None
    reward: str | None = None
    steps: int | None = None
    out: Path | None = None
    resume: bool = False
    inject_fault: str | None = None
    require_certificate: Path | None = None
    overrides: tuple[str, ...] = ()


def resolve(args: LaunchArgs, environ: Mapping[str, str] = os.environ) -> LaunchPlan:
    """The plan of a run.

    Raises `LayoutError` listing all violations of an impossible layout, and `ValueError` with the
    value and the remedy for everything else that cannot be run as asked.
    """
    profile = get_profile(args.model)
    settings = compose_settings(profile.name, args.overrides, _flags(args))
    check_settings(settings)
    layout, contract = settings.layout, settings.contract.name
    check_family(contract, profile)
    device, num_gpus = _device(settings, environ)
    segments = resolve_segments(contract, layout, settings.contract.segments)
    validate(
        layout,
        profile,
        effective_contract(contract),
        segments,
        num_gpus=num_gpus,
        colocate=settings.cluster.colocate,
        num_engines=settings.rollout.num_engines,
    )
    # A cluster's GPUs are seen once its ranks are up.
    seen = device == "cuda" and not environ.get("RAY_ADDRESS")
    capability = host_facts()["capability"] if seen else None
    attention = attention_path(settings.attention, profile, device, capability)
    policy = kernel_policy(contract, profile, layout, segments, attention)
    if contract == CONTRACT_OFF and settings.train.entropy:
        raise ValueError(
            "train.entropy=true with contract off: stock layers report none; name a contract, or "
            "leave it out"
        )
    fault = _fault(args.inject_fault, profile, contract, layout)
    paths = _paths(args, settings, profile, environ)
    _check_inputs(settings, profile, paths)
    table = render.switches(
        render.RenderInputs(
            profile=profile,
            layout=layout,
            policy=policy,
            settings=settings,
            device=device,
            model_path=paths.model_path,
            cpu_ids=cpu_ids(),
            fault=fault,
        )
    )
    plan = LaunchPlan(
        version=PLAN_VERSION,
        model=profile,
        layout=layout,
        contract=contract,
        segments=segments,
        device=device,
        num_gpus=num_gpus,
        policy=policy,
        rollout=RolloutPlan(
            engine_kwargs=render.engine_arguments(table),
            env=render.environment(table, "rollout", environ),
            expected_readback=render.engine_readback(table),
        ),
        trainer=_trainer_plan(table, layout, environ),
        run=settings.run,
        training=settings.train,
        engine=settings.rollout,
        cluster=settings.cluster,
        paths=paths,
        certificate=_certificate(settings, layout, device, environ),
        fault=fault,
        resume=args.resume,
        overrides=args.overrides,
    )
    if plan.resume:
        _check_resumes(plan)
    return plan


def _certificate(
    settings: Settings, layout: Layout, device: Device, environ: Mapping[str, str]
) -> CertificatePlan | None:
    """The required certificate, once it covers what this plan runs."""
    if settings.run.require_certificate is None:
        return None
    contract = settings.contract.name
    if contract == CONTRACT_OFF:
        raise ValueError(
            "--require-certificate with contract off: stock engines run no certified op; name a "
            "contract, or drop the requirement"
        )
    return require(
        Path(settings.run.require_certificate).expanduser(),
        row_linear_order=get_contract(contract).row_linear.order,
        device=device,
        degrees=(layout.rollout_tp, layout.train_tp),
        # A cluster's machines are seen once its ranks are up.
        local=not environ.get("RAY_ADDRESS"),
    )


def _fault(
    text: str | None, profile: ModelProfile, contract: str, layout: Layout
) -> FaultPlan | None:
    if text is None:
        return None
    fault = parse_fault(text, profile.num_hidden_layers)
    if contract == CONTRACT_OFF and fault.side == "rollout":
        raise ValueError(
            f"--inject-fault {text}: with contract off the rollout is stock and can carry no fault"
        )
    ranks = layout.rollout_tp if fault.side == "rollout" else layout.train_tp
    if fault.rank is not None and fault.rank >= ranks:
        raise ValueError(
            f"--inject-fault {text}: rank {fault.rank} of a {fault.side} with tensor-parallel size "
            f"{ranks}; choose 0 to {ranks - 1}"
        )
    return fault


def _trainer_plan(
    table: tuple[render.Switch, ...], layout: Layout, environ: Mapping[str, str]
) -> TrainerPlan:
    return TrainerPlan(
        world_size=layout.train_world_size,
        config_kwargs=render.transformer_config(table),
        model_kwargs=render.model_arguments(table),
        parallel_kwargs=render.parallel_state(layout),
        env=render.environment(table, "trainer", environ),
    )


def _flags(args: LaunchArgs) -> dict[str, Any]:
    """Flags as settings keys; `--tp N` is both degrees."""
    if args.tp is not None and (args.rollout_tp is not None or args.train_tp is not None):
        raise ValueError("--tp sets both degrees; give either --tp, or --rollout-tp and --train-tp")
    values = {
        "layout.rollout_tp": args.tp if args.tp is not None else args.rollout_tp,
        "layout.train_tp": args.tp if args.tp is not None else args.train_tp,
        "layout.pp": args.pp,
        "layout.cp": args.cp,
        "contract.name": args.contract,
        "contract.segments": args.segments,
        "device": args.device,
        "run.prompts": args.prompts,
        "run.reward": args.reward,
        "run.steps": args.steps,
        "run.require_certificate": args.require_certificate and str(args.require_certificate),
    }
    return {key: value for key, value in values.items() if value is not None}


def _device(settings: Settings, environ: Mapping[str, str]) -> tuple[Device, int | None]:
    """The device, and the GPUs to count against the layout (None: none to count here)."""
    stated = settings.cluster.num_gpus
    gpus = stated if stated is not None else visible_gpus(environ)
    device = resolve_device(settings.device, gpus)
    if device == "cpu":
        return device, None
    if stated is None and environ.get("RAY_ADDRESS"):
        # The cluster's GPUs are not this machine's; placement is checked when it is joined.
        return device, None
    return device, gpus


def _paths(
    args: LaunchArgs, settings: Settings, profile: ModelProfile, environ: Mapping[str, str]
) -> PathsPlan:
    if args.resume and args.out is None:
        raise ValueError("--resume needs --out DIR, the folder of the run to continue")
    out = (args.out or _default_out(profile)).expanduser().absolute()
    check_out(out, args.resume)
    seed = settings.model.weights_seed
    if args.model_path is not None:
        model_path = args.model_path.expanduser().absolute()
    else:
        model_path = seeded_folder(profile, seed, environ).absolute()
    prompts = settings.run.prompts
    if not prompts.startswith(BUILTIN):
        prompts = str(Path(prompts).expanduser().absolute())
    return PathsPlan(
        model_path=str(model_path),
        seeded=args.model_path is None,
        weights_seed=seed,
        prompts=prompts,
        reward=settings.run.reward,
        out=str(out),
    )


def _default_out(profile: ModelProfile) -> Path:
    base = Path("runs") / f"{profile.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidate, number = base, 1
    while candidate.exists():
        number += 1
        candidate = base.with_name(f"{base.name}-{number}")
    return candidate


def _check_inputs(settings: Settings, profile: ModelProfile, paths: PathsPlan) -> None:
    """Weights, prompts and reward, as far as they can be judged without running anything."""
    folder = Path(paths.model_path)
    tokenizer = profile.vocab_size >= NUM_TOKENS
    if not paths.seeded:
        check_same_shape(profile, folder)
        check_weights(folder, profile)
        tokenizer = has_tokenizer(folder)
    context = settings.rollout.context_length or profile.max_position_embeddings
    if context > profile.max_position_embeddings:
        raise ValueError(
            f"rollout.context_length={context} exceeds max_position_embeddings="
            f"{profile.max_position_embeddings} of {profile.name}"
        )
    room = context - settings.run.max_new_tokens
    if room < 1:
        raise ValueError(
            f"run.max_new_tokens={settings.run.max_new_tokens} leaves no room for a prompt in a "
            f"context of {context} tokens; lower it, or raise rollout.context_length"
        )
    check_reward_name(paths.reward)
    if paths.prompts.startswith(BUILTIN):
        name = paths.prompts.removeprefix(BUILTIN)
        if name not in TASKS:
            raise ValueError(f"unknown built-in prompts {name!r}; choose from {', '.join(TASKS)}")
        prompts = TASKS[name].prompts
    else:
        prompts = read_prompts(Path(paths.prompts))
    check_prompts(
        prompts,
        vocab_size=profile.vocab_size,
        room=room,
        tokenizer=tokenizer,
        model=str(folder),
    )


def _check_resumes(plan: LaunchPlan) -> None:
    """A resumed run continues the same weights under the same numbers; its layout may change."""
    earlier = read(Path(plan.paths.out) / PLAN_FILE)
    pairs = [
        ("model", earlier.model.name, plan.model.name),
        ("model path", earlier.paths.model_path, plan.paths.model_path),
        ("contract", earlier.contract, plan.contract),
    ]
    different = [f"{what}: was {old}, now {new}" for what, old, new in pairs if old != new]
    if different:
        raise ValueError(f"--resume {plan.paths.out}: another run; " + "; ".join(different))
