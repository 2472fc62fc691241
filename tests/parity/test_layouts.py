"""The claim: rollout logprob - trainer logprob is 0.0 for every token, at every layout, with
training and a weight sync between the comparisons. The real engine, real Megatron, real Ray."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import SMALL, assert_exact, run_miles

# (rollout_tp, train_tp, pp, cp)
LAYOUTS_V2 = [
    (1, 1, 1, 1),
    (2, 2, 1, 1),
    (1, 2, 1, 1),
    (2, 1, 1, 1),
    (4, 2, 1, 1),
    (1, 1, 2, 1),
    (1, 1, 1, 2),
    (2, 2, 2, 1),
]
# K of o_proj is 512 and of down_proj 1536, so every shard here is whole 128-wide tiles.
LAYOUTS_V1 = [(2, 2, 1, 1), (4, 2, 1, 1), (1, 2, 1, 1)]


def _arguments(layout: tuple[int, int, int, int]) -> list[str]:
    flags = ("--rollout-tp", "--train-tp", "--pp", "--cp")
    return [part for flag, n in zip(flags, layout, strict=True) for part in (flag, str(n))]


@pytest.mark.parametrize("layout", LAYOUTS_V2, ids=str)
def test_exact_zero_over_three_training_steps_v2(
    layout: tuple[int, int, int, int], tmp_path: Path
) -> None:
    ended = run_miles(
        "launch", "qwen3-tiny", *_arguments(layout), "--steps", "3", *SMALL, out=tmp_path / "run"
    )
    assert_exact(ended, steps=3)
    assert ended.report is not None
    assert ended.report["segments"] == max(layout[:2])
    assert tuple(ended.report["layout"].values()) == layout


@pytest.mark.parametrize("layout", LAYOUTS_V1, ids=str)
def test_exact_zero_over_three_training_steps_v1(
    layout: tuple[int, int, int, int], tmp_path: Path
) -> None:
    ended = run_miles(
        "launch",
        "qwen3-tiny",
        *_arguments(layout),
        "--contract",
        "qwen3_dense_true_on_policy_v1",
        "--steps",
        "3",
        *SMALL,
        out=tmp_path / "run",
    )
    assert_exact(ended, steps=3)


def test_parity_at_another_temperature_with_small_prefill_chunks(tmp_path: Path) -> None:
    """Chunk borders inside prompts, a warm prefix cache in step 1, and T=0.7."""
    ended = run_miles(
        "parity",
        "qwen3-tiny",
        "--tp",
        "2",
        "--segments",
        "8",
        "--steps",
        "2",
        "run.temperature=0.7",
        "run.max_new_tokens=12",
        "rollout.chunked_prefill_size=16",
        "run.prompts_per_step=26",
        "run.samples_per_prompt=1",
        "train.micro_batch_size=2",
        out=tmp_path / "run",
    )
    assert_exact(ended, steps=2, train=False)
    assert ended.report is not None and ended.report["segments"] == 8
    # The paths that the claim is about did run: prompts cut at 16 tokens, prefixes met again.
    log = (ended.out / "logs" / "rollout.log").read_text()
    new = [int(n) for n in re.findall(r"#new-token: (\d+)", log)]
    cached = [int(n) for n in re.findall(r"#cached-token: (\d+)", log)]
    assert new and max(new) <= 16, "a prompt was prefilled in one piece"
    assert max(cached) > 0, "the second step met a cold cache"
