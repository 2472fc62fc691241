"""Run the real `miles` in a process of its own and look at what it left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
MILES = [sys.executable, "-m", "miles_launcher.cli"]
# Eight sequences of up to twelve tokens: enough to differ in length, quick on two cores.
SMALL = ("run.prompts_per_step=2", "run.samples_per_prompt=4", "run.max_new_tokens=12")
_LIMIT_SECONDS = 600


@dataclass(frozen=True)
class Ended:
    """A finished run: exit code, what it printed, and its report (None where none was written)."""

    returncode: int
    output: str
    out: Path
    report: dict[str, Any] | None

    @property
    def steps(self) -> list[dict[str, Any]]:
        assert self.report is not None, self.output
        return self.report["steps"]

    def explain(self) -> str:
        """For assertion messages."""
        return f"exit code {self.returncode}\n{self.output}"


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment with the repository importable, seeded weights shared, a wide terminal."""
    return {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "COLUMNS": "200",
        **(extra or {}),
    }


def read_report(out: Path) -> dict[str, Any] | None:
    path = out / "report.json"
    return json.loads(path.read_text()) if path.is_file() else None


def run_miles(
    *arguments: str, out: Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Ended:
    """Run to the end; the test fails if that takes longer than ten minutes."""
    # Not the repository: a folder named like a package would be found before the installed one.
    process = subprocess.run(
        [*MILES, *arguments, "--out", str(out)],
        cwd=cwd or out.parent,
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_SECONDS,
    )
    return Ended(process.returncode, process.stdout, out, read_report(out))


def run_and_disturb(
    *arguments: str,
    out: Path,
    when: Callable[[psutil.Process], bool],
    disturb: Callable[[psutil.Process], None],
) -> tuple[Ended, list[psutil.Process]]:
    """Start, wait until `when` holds for the process, `disturb` it, wait for the end.

    Returns the end and every process that descended from the run at the time of the disturbance.
    """
    log = out.parent / "output.txt"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*MILES, *arguments, "--out", str(out)],
            cwd=out.parent,
            env=environment(),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A test run in the background may have SIGINT ignored, which a child inherits.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        root = psutil.Process(process.pid)
        deadline = time.monotonic() + _LIMIT_SECONDS
        try:
            while not when(root):
                assert process.poll() is None, f"ended early:\n{log.read_text()}"
                assert time.monotonic() < deadline, f"never got there:\n{log.read_text()}"
                time.sleep(0.1)
            family = root.children(recursive=True)
            disturb(root)
            process.wait(timeout=_LIMIT_SECONDS)
        finally:
            if process.poll() is None:
                for child in root.children(recursive=True):
                    child.kill()
                process.kill()
    return Ended(process.returncode, log.read_text(), out, read_report(out)), family


def steps_done(out: Path, count: int) -> Callable[[psutil.Process], bool]:
    """A condition: the report holds `count` finished steps."""

    def reached(_: psutil.Process) -> bool:
        report = read_report(out)
        return report is not None and len(report["steps"]) >= count

    return reached


def still_running(processes: Sequence[psutil.Process], patience: float = 15.0) -> list[str]:
    """The processes that have not ended after `patience` seconds."""
    _, alive = psutil.wait_procs(processes, timeout=patience)
    return [
        f"{p.pid} {' '.join(p.cmdline())[:120]}"
        for p in alive
        if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
    ]


def assert_exact(ended: Ended, *, steps: int, train: bool = True) -> None:
    """Every step compared tokens, none differed, and both sides held the same new weights."""
    assert ended.returncode == 0, ended.explain()
    assert ended.report is not None
    assert ended.report["ok"] is True and ended.report["ended"] == "complete"
    assert len(ended.steps) == steps
    for step in ended.steps:
        assert step["compared_tokens"] > 0
        assert step["mismatched_tokens"] == 0 and step["max_abs_diff"] == 0.0
        digests = step["weights_digest"]
        assert digests["rollout"] == digests["trainer"] is not None
    sides = ended.report["fingerprint"]
    assert sides["rollout"] == sides["trainer"]
    if train:
        # The gate of step 2 saw other weights than that of step 1, or syncing was never tested.
        seen = [step["weights_digest"]["trainer"] for step in ended.steps]
        assert len(set(seen)) == len(seen)
