"""Shared by the launcher's tests: a plan that depends on nothing of this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from miles_launcher import resolve as resolving
from miles_launcher.plan import LaunchPlan
from miles_launcher.profiles import get_profile
from miles_launcher.resolve import LaunchArgs, resolve
from miles_launcher.seeded_weights import ensure_seeded_weights

PlanFor = Callable[..., LaunchPlan]


@pytest.fixture
def plan_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PlanFor:
    """`plan_for(model, ...)`: resolve with four cores, no GPU and an empty environment."""
    monkeypatch.setattr(resolving, "cpu_ids", lambda: (0, 1, 2, 3))
    monkeypatch.setattr(resolving, "visible_gpus", lambda environ: 0)

    def make(model: str = "qwen3-tiny", **arguments: object) -> LaunchPlan:
        environ = arguments.pop("environ", {})
        assert isinstance(environ, dict)
        arguments.setdefault("out", tmp_path / "run")
        return resolve(
            LaunchArgs(model=model, **arguments),  # type: ignore[arg-type]
            {"MILES_HOME": "/models", **environ},
        )

    return make


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seeded qwen3-tiny as a Hugging Face folder (do not change it; copy it)."""
    folder = tmp_path_factory.mktemp("weights") / "tiny"
    return ensure_seeded_weights(get_profile("qwen3-tiny"), 0, folder)
