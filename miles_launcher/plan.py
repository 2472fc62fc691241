"""The plan: everything a run needs, resolved and validated, frozen, and written as JSON.

`resolve` turns what was typed into a `LaunchPlan`; `write` puts it into the run's folder; the run
starts from that file and from nothing else, so that what was shown is what is started.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .codec import from_data, to_data
from .conformance.requirement import CertificatePlan
from .faults import FaultPlan
from .layout import Layout
from .policy import Device, KernelPolicy
from .profiles import ModelProfile
from .settings import ClusterSettings, RolloutSettings, RunSettings, TrainSettings

PLAN_VERSION = 2
PLAN_FILE = "plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """The engine: keywords of `sglang.Engine`, its processes' variables, and the arguments that
    every scheduler rank must report unchanged before the first token."""

    engine_kwargs: dict[str, Any]
    env: dict[str, str]
    expected_readback: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    """The trainer ranks: keywords of Megatron's TransformerConfig (dtypes and activation as
    strings), GPTModel and initialize_model_parallel, and the variables of each rank."""

    world_size: int
    config_kwargs: dict[str, Any]
    model_kwargs: dict[str, Any]
    parallel_kwargs: dict[str, Any]
    env: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathsPlan:
    """Absolute paths. `seeded`: `model_path` is made on demand from `weights_seed`.

    `prompts` is `builtin:NAME` or a file, `reward` `builtin:NAME` or `module:function`.
    """

    model_path: str
    seeded: bool
    weights_seed: int
    prompts: str
    reward: str
    out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One run. `contract` is a registry name, or `off` for the control: stock kernels on both
    sides. `num_gpus` is None where they are not counted, `certificate` where none is required."""

    version: int
    model: ModelProfile
    layout: Layout
    contract: str
    segments: int
    device: Device
    num_gpus: int | None
    policy: KernelPolicy
    rollout: RolloutPlan
    trainer: TrainerPlan
    run: RunSettings
    training: TrainSettings
    engine: RolloutSettings
    cluster: ClusterSettings
    paths: PathsPlan
    certificate: CertificatePlan | None
    fault: FaultPlan | None
    resume: bool
    overrides: tuple[str, ...]

    def to_json(self) -> str:
        """The plan as text; `from_json` gives an equal plan back."""
        return json.dumps(to_data(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> LaunchPlan:
        """Read a plan. Raises `ValueError` for another version, or anything not understood."""
        data = json.loads(text)
        version = data.get("version") if isinstance(data, dict) else None
        if version != PLAN_VERSION:
            raise ValueError(f"plan version {version!r}, this launcher reads {PLAN_VERSION}")
        return from_data(cls, data, "plan")


def read(path: Path) -> LaunchPlan:
    """Read a written plan; `ValueError` naming the file where that is impossible."""
    try:
        return LaunchPlan.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot read the plan ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def write(plan: LaunchPlan, out: Path) -> Path:
    """Write `plan.json` into `out`, made if needed; returns the file's path.

    Raises `ValueError` where `out` holds anything, unless the plan resumes a run there; the plan
    of the earlier start is then kept under another name.
    """
    check_out(out, plan.resume)
    out.mkdir(parents=True, exist_ok=True)
    path = out / PLAN_FILE
    if path.exists():
        earlier = len(list(out.glob("plan-*.json")))
        path.rename(out / f"plan-{earlier}.json")
    temporary = out / f".{PLAN_FILE}.tmp"
    temporary.write_text(plan.to_json(), encoding="utf-8")
    temporary.rename(path)
    return path


def check_out(out: Path, resume: bool) -> None:
    """Raise `ValueError` where a run in `out` would touch what is already there."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: this is a file; name a folder")
    if resume:
        if not (out / PLAN_FILE).is_file():
            raise ValueError(f"--resume: no {PLAN_FILE} in {out}, so there is no run to resume")
    elif out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out {out}: not empty; choose another name, or continue with --resume")
