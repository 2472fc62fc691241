"""The plan of a bisection: one step, taps on, two sides; perhaps of a batch that was kept."""

from __future__ import annotations

import difflib
import shlex
from dataclasses import replace
from pathlib import Path

from .mismatch import replay_arguments
from .plan import LaunchPlan
from .policy import CONTRACT_OFF
from .resolve import LaunchArgs, resolve

Sides = tuple[str, str]
ENGINES: Sides = ("rollout", "trainer")
PHASES: Sides = ("decode", "prefill")
# One batch; and a pass replayed from a CUDA graph runs no tap.
_FORCED = ("run.steps=1", "rollout.cuda_graph=false")


def bisection_plan(
    args: LaunchArgs, between: str, replay: Path | None = None, sweep: str | None = None
) -> tuple[LaunchPlan, Sides, tuple[str, ...]]:
    """What `miles bisect` runs, its two sides, and those into which faults are swept.

    Raises `ValueError` where no two sides of that name exist, where a model and a kept batch are
    both given or neither, or where the settings allow no bisection.
    """
    sides = _sides(between)
    if replay is None:
        if not args.model:
            raise ValueError("name a model, or a run whose gate closed with --replay DIR")
        args = replace(args, overrides=_forced(args.overrides, "run=parity"))
    else:
        given = [name for name in ("tp", "rollout_tp", "train_tp", "pp", "cp", "contract",
                                   "segments", "device", "model_path", "prompts", "inject_fault")
                 if getattr(args, name) is not None]  # fmt: skip
        if args.model or given:
            raise ValueError(
                f"--replay {replay}: model and flags are those of that run; leave out "
                + ", ".join([*([args.model] if args.model else []), *given])
            )
        if sweep is not None:
            raise ValueError("--sweep needs no batch of another run; leave out --replay")
        args = replay_arguments(replay.expanduser().absolute(), args.out, args.overrides)
        args = replace(args, overrides=_forced(args.overrides))
    plan = resolve(args)
    if plan.contract == CONTRACT_OFF:
        raise ValueError("bisect with contract off: stock layers have no taps; name a contract")
    if plan.fault is not None and (sides == PHASES or sweep is not None):
        flag = "--sweep" if sweep is not None else "--between decode,prefill"
        raise ValueError(f"{flag}: both sides would have the injected fault; drop --inject-fault")
    return plan, sides, _swept(sweep, sides)


def _forced(overrides: tuple[str, ...], *defaults: str) -> tuple[str, ...]:
    """`overrides`, with the defaults that they leave open, and with what a bisection needs."""
    keys = {text.partition("=")[0] for text in overrides}
    forced = {text.partition("=")[0] for text in _FORCED}
    kept = [text for text in overrides if text.partition("=")[0] not in forced]
    return (*(d for d in defaults if d.partition("=")[0] not in keys), *kept, *_FORCED)


def _sides(text: str) -> Sides:
    choices = {",".join(sides): sides for sides in (ENGINES, PHASES)}
    if text in choices:
        return choices[text]
    close = difflib.get_close_matches(text, choices, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(f"--between {text!r}{hint} (choices: {' or '.join(choices)})")


def _swept(text: str | None, sides: Sides) -> tuple[str, ...]:
    if text is None:
        return ()
    choices = {"both": sides, **{side: (side,) for side in sides}}
    if text not in choices:
        raise ValueError(f"--sweep {text!r} (choices: {', '.join(choices)})")
    return choices[text]


def replay_command(out: Path) -> str:
    """What to type to bisect the batch that closed the gate of the run in `out`."""
    return shlex.join(["miles", "bisect", "--replay", str(out)])
