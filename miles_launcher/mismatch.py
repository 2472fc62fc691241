"""A batch that closed the gate, kept so that `miles bisect --replay` can run that very one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .plan import PLAN_FILE, read
from .resolve import LaunchArgs

MISMATCH_FILE = "mismatch.json"
WEIGHTS_FOLDER = "mismatch-weights"
_FIELDS = ("step", "tokens", "prompt_lengths", "rollout_logprobs", "trainer_logprobs", "weights")


def write_mismatch(
    out: Path,
    step: int,
    batch: Mapping[str, Any],
    logprobs: tuple[Sequence[Any], Sequence[Any]],
    weights: Path,
) -> None:
    """Write `mismatch.json`: the step, its tokens, both sides' logprobs, and where the weights of
    that step lie."""
    data = {
        "step": step,
        **batch,
        "rollout_logprobs": [[float(x) for x in row] for row in logprobs[0]],
        "trainer_logprobs": [[float(x) for x in row] for row in logprobs[1]],
        "weights": str(weights),
    }
    path = out / MISMATCH_FILE
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(data) + "\n", encoding="utf-8")
    temporary.rename(path)


def read_mismatch(out: Path) -> dict[str, Any]:
    """The mismatch of the run in `out`. Raises `ValueError` naming a file that is missing, not
    whole, or not of this form."""
    path = out / MISMATCH_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path}: cannot read it ({error.strerror}); only a run whose gate closed over a "
            "token has one"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: not a whole file ({error})") from None
    missing = [name for name in _FIELDS if not isinstance(data, dict) or name not in data]
    if missing:
        raise ValueError(f"{path}: not a mismatch of this version: no {', '.join(missing)}")
    return dict(data)


def replay_arguments(folder: Path, out: Path | None, overrides: Sequence[str]) -> LaunchArgs:
    """The command line of a bisection of the batch that closed the gate of the run in `folder`:
    its own, with the weights of that step.

    Raises `ValueError` where there is no such run or no such batch.
    """
    plan, mismatch = read(folder / PLAN_FILE), read_mismatch(folder)
    weights = Path(mismatch["weights"])
    same = str(weights) == plan.paths.model_path
    if not same and not weights.is_dir():
        raise ValueError(
            f"{weights}: the weights of step {mismatch['step']} are not there any more"
        )
    fault = plan.fault
    return LaunchArgs(
        model=plan.model.name,
        rollout_tp=plan.layout.rollout_tp,
        train_tp=plan.layout.train_tp,
        pp=plan.layout.pp,
        cp=plan.layout.cp,
        contract=plan.contract,
        segments=plan.segments,
        device=plan.device,
        model_path=None if same and plan.paths.seeded else weights,
        prompts=plan.paths.prompts,
        out=out,
        inject_fault=None if fault is None else f"{fault.side}:{fault.place}",
        overrides=(*plan.overrides, *overrides),
    )
