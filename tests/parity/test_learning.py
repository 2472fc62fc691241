"""On-policy to the last bit, and it learns: the built-in task's reward rises."""

from __future__ import annotations

from pathlib import Path

from harness import assert_exact, run_miles

STEPS = 20


def test_reward_rises_while_every_step_is_exact(tmp_path: Path) -> None:
    ended = run_miles(
        "launch",
        "qwen3-tiny",
        "--steps",
        str(STEPS),
        "run=learn",
        "run.samples_per_prompt=4",
        "train.lr=2e-3",
        out=tmp_path / "run",
    )
    assert_exact(ended, steps=STEPS)
    rewards = [step["reward_mean"] for step in ended.steps]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert last > 3 * first, rewards
    assert any((tmp_path / "run").glob("events.out.tfevents.*"))
