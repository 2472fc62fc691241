"""Entry point of the SGLang plugin (`sglang.srt.plugins`): check every target, then register.

SGLang loads this in every process of an engine, before server arguments exist. It refuses to
register anything where one target is missing or changed: half a contract is worse than none, and
the missing readback then stops the launcher.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from dataclasses import dataclass
from typing import Any

from .hooks.target import Hook

SUPPORTED_SGLANG = "0.5.17"
_FILES = (
    "activation",
    "args",
    "attention",
    "communicator",
    "cpu",
    "linear",
    "logits",
    "model",
    "norm",
    "qk_norm_rope",
    "rope",
    "sampler",
    "scheduler",
    "taps",
)


@dataclass(frozen=True, slots=True)
class TargetCheck:
    """Whether one hook's target is there and is the text that the hook was written against."""

    target: str
    found: bool
    unchanged: bool
    detail: str


def hooks() -> tuple[Hook, ...]:
    """Every hook, in a fixed order."""
    found: list[Hook] = []
    for name in _FILES:
        found += importlib.import_module(f"{__package__}.hooks.{name}").HOOKS
    return tuple(found)


def _check(hook: Hook) -> TargetCheck:
    try:
        digest = hook.source_digest()
    except (AttributeError, ImportError, OSError, TypeError) as error:
        return TargetCheck(hook.target, False, False, f"{type(error).__name__}: {error}")
    if digest != hook.digest:
        return TargetCheck(
            hook.target, True, False, f"source digest {digest}, written against {hook.digest}"
        )
    return TargetCheck(hook.target, True, True, digest)


def check_targets() -> list[TargetCheck]:
    """One row per hook. Imports SGLang's modules, changes nothing."""
    return [_check(hook) for hook in hooks()]


def register() -> None:
    """Register all hooks with SGLang, or raise `RuntimeError` naming every target that moved."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import cpu_platform

    installed = importlib.metadata.version("sglang")
    problems = (
        []
        if installed == SUPPORTED_SGLANG
        else [f"sglang {installed} is installed, these hooks were written for {SUPPORTED_SGLANG}"]
    )
    problems += [
        f"{row.target}: {row.detail}"
        for row in check_targets()
        if not (row.found and row.unchanged)
    ]
    if problems:
        raise RuntimeError("true on-policy hooks refused: " + "; ".join(problems))
    _extend_engine()
    on_cpu = os.environ.get("SGLANG_PLATFORM") == cpu_platform.NAME
    for hook in hooks():
        if hook.cpu_only and not on_cpu:
            continue
        HookRegistry.register(hook.target, hook.wrapper(), HookType.AROUND)


def _extend_engine() -> None:
    from sglang.srt import server_args

    from .hooks.args import add_fields
    from .hooks.scheduler import add_rpcs

    add_fields(server_args.ServerArgs)
    add_rpcs()


def main() -> Any:
    """What the entry point calls."""
    return register()
