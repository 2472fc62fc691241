"""Shared by all tests: one torch thread, and no process outlives the tests that started it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from multiprocessing import resource_tracker

import hypothesis
import psutil
import pytest

# Examples are the same in every run, and a busy machine is not a counterexample.
hypothesis.settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")

_MARK = "TRUE_ON_POLICY_TEST_SESSION"
_GRACE_SECONDS = 10.0


def _belongs(process: psutil.Process, mark: str) -> bool:
    """Whether a process inherited this session's mark: a child whose parent died is no longer in
    the tree below pytest, but keeps the environment it was started with."""
    try:
        return process.environ().get(_MARK) == mark
    except (psutil.Error, OSError):
        return False


def _left_behind(mark: str) -> list[psutil.Process]:
    own = psutil.Process()
    found = {process.pid: process for process in own.children(recursive=True)}
    for process in psutil.process_iter():
        if process.pid != own.pid and _belongs(process, mark):
            found[process.pid] = process
    # The standard library's own helper serves spawned processes and ends with the interpreter.
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    found.pop(tracker, None)
    return list(found.values())


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:200] or process.name()}"
    except psutil.Error:
        return f"{process.pid}: (ended meanwhile)"


@pytest.fixture(scope="session", autouse=True)
def _no_process_left_behind() -> Iterator[None]:
    """Fails the session where a test started a process and did not end it.

    First to be set up, so last to be torn down: fixtures that own processes have closed them.
    """
    mark = uuid.uuid4().hex
    before = os.environ.get(_MARK)
    os.environ[_MARK] = mark
    yield
    _, alive = psutil.wait_procs(_left_behind(mark), timeout=_GRACE_SECONDS)
    if before is None:
        del os.environ[_MARK]
    else:
        os.environ[_MARK] = before
    if alive:
        lines = "\n".join(_describe(process) for process in alive)
        pytest.fail(f"{len(alive)} processes outlived the tests:\n{lines}", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread(_no_process_left_behind: None) -> None:
    """Tests share the machine with each other's engines and ranks; small tensors gain nothing."""
    import torch

    torch.set_num_threads(1)
