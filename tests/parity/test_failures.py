"""What goes wrong outside the numbers: each end has an exit code and a report; no process stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
from harness import SMALL, assert_exact, run_and_disturb, run_miles, steps_done, still_running

LONG = ("launch", "qwen3-tiny", "--steps", "200", *SMALL)


def _scheduler(root: psutil.Process) -> psutil.Process:
    found = [p for p in root.children(recursive=True) if "scheduler" in p.name().lower()]
    found = found or [
        p for p in root.children(recursive=True) if any("scheduler" in a for a in p.cmdline())
    ]
    assert found, [(p.name(), p.cmdline()) for p in root.children(recursive=True)]
    return found[0]


def _trainer(root: psutil.Process) -> psutil.Process:
    found = [
        p
        for p in root.children(recursive=True)
        if any("TrainerActor" in part for part in [p.name(), *p.cmdline()])
    ]
    assert found, [(p.name(), p.cmdline()) for p in root.children(recursive=True)]
    return found[0]


def test_ctrl_c_ends_every_process_and_writes_the_report(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended, family = run_and_disturb(
        *LONG,
        out=out,
        when=steps_done(out, 1),
        # As a terminal does it: the whole foreground group gets the signal.
        disturb=lambda root: os.killpg(root.pid, signal.SIGINT),
    )
    assert ended.returncode == 130, ended.explain()
    assert ended.report is not None and ended.report["ended"] == "interrupted"
    assert ended.report["ok"] is False and len(ended.steps) >= 1
    assert family and not still_running(family)


def test_a_dead_engine_is_exit_code_4_with_its_last_words(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended, family = run_and_disturb(
        *LONG, out=out, when=steps_done(out, 1), disturb=lambda root: _scheduler(root).kill()
    )
    assert ended.returncode == 4, ended.explain()
    assert ended.report is not None and ended.report["ended"] == "process died"
    assert "rollout" in ended.report["message"] and "rollout.log" in ended.output
    assert not still_running(family)


def test_a_dead_trainer_is_exit_code_4_with_its_last_words(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended, family = run_and_disturb(
        *LONG, out=out, when=steps_done(out, 1), disturb=lambda root: _trainer(root).kill()
    )
    assert ended.returncode == 4, ended.explain()
    assert ended.report is not None and "trainer rank 0" in ended.report["message"]
    assert "trainer-0.log" in ended.output
    assert not still_running(family)


def test_own_prompts_own_reward_and_a_resumed_run(tmp_path: Path) -> None:
    """A user's files end to end; then the same folder goes on where it stopped."""
    (tmp_path / "rewards.py").write_text(
        "def length(samples):\n"
        "    assert all(s.label == 7 and s.metadata == {'kind': 'own'} for s in samples)\n"
        "    return [float(len(s.response_ids) + len(set(s.response_ids))) for s in samples]\n"
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "Gr\\u00fc\\u00dfe, count: ", "label": 7, "kind": "own"}\n'
        '{"prompt_ids": [65, 66, 67], "label": 7, "kind": "own"}\n'
        '{"messages": [{"role": "user", "content": "Hello"}], "label": 7, "kind": "own"}\n'
    )
    out = tmp_path / "run"
    arguments = (
        "launch",
        "qwen3-tiny",
        "--prompts",
        str(prompts),
        "--reward",
        "rewards:length",
        *SMALL,
    )
    first = run_miles(*arguments, "--steps", "1", out=out, cwd=tmp_path)
    assert_exact(first, steps=1)
    refused = run_miles(*arguments, "--steps", "2", out=out, cwd=tmp_path)
    assert refused.returncode == 2 and "--resume" in refused.output
    resumed = run_miles(*arguments, "--steps", "2", "--resume", out=out, cwd=tmp_path)
    assert_exact(resumed, steps=2)
    assert resumed.steps[0] == first.steps[0], "the first step was kept, not run again"


def test_a_reward_that_returns_nan_is_named(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def broken(samples):\n    return [float('nan')] * len(samples)\n"
    )
    ended = run_miles(
        "launch",
        "qwen3-tiny",
        "--reward",
        "rewards:broken",
        *SMALL,
        out=tmp_path / "run",
        cwd=tmp_path,
    )
    assert ended.returncode == 2, ended.explain()
    assert "nan" in ended.output and "sample 0" in ended.output
    assert ended.report is not None and ended.report["ended"] == "configuration"
