"""Runs that must not come out exact. A gate that lets one of these through shows nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from harness import REPOSITORY, SMALL, run_miles


def test_without_a_contract_stock_engines_differ(tmp_path: Path) -> None:
    ended = run_miles(
        "launch", "qwen3-tiny", "--tp", "2", "--contract", "off", *SMALL, out=tmp_path / "run"
    )
    assert ended.returncode == 3, ended.explain()
    assert ended.report is not None and ended.report["ended"] == "gate closed"
    (step,) = ended.steps
    assert step["compared_tokens"] > 0
    assert step["mismatched_tokens"] > 0.9 * step["compared_tokens"]
    assert step["max_abs_diff"] > 0
    assert step["grad_norm"] is None, "the gate compares before the update"


@pytest.mark.parametrize("place", ["trainer:2:down_proj", "rollout:0:q_norm"])
def test_one_ulp_closes_the_gate(place: str, tmp_path: Path) -> None:
    ended = run_miles("launch", "qwen3-tiny", "--inject-fault", place, *SMALL, out=tmp_path / "run")
    assert ended.returncode == 3, ended.explain()
    (step,) = ended.steps
    assert step["mismatched_tokens"] > 0 and step["grad_norm"] is None
    first = step["mismatches"][0]
    assert first["rollout_bits"] != first["trainer_bits"] and first["ulp"] >= 1
    assert (tmp_path / "run" / "mismatch.json").is_file()


def test_a_plugin_that_cannot_load_stops_the_launch(tmp_path: Path) -> None:
    """SGLang logs such a plugin and serves stock kernels; the launcher must not."""
    broken = tmp_path / "broken"
    shutil.copytree(REPOSITORY / "sglang_patch", broken / "sglang_patch")
    hooks = broken / "sglang_patch" / "hooks" / "sampler.py"
    text = hooks.read_text()
    assert 'digest="' in text
    hooks.write_text(text.replace('digest="', 'digest="0'))
    ended = run_miles(
        "launch",
        "qwen3-tiny",
        *SMALL,
        out=tmp_path / "run",
        env={"PYTHONPATH": f"{broken}:{REPOSITORY}"},
    )
    assert ended.returncode == 3, ended.explain()
    assert "plugin did not load" in ended.output
    assert ended.steps == []
    log = (tmp_path / "run" / "logs" / "rollout.log").read_text()
    assert "Sampler.forward" in log and "written against" in log


def test_different_kernels_on_the_two_sides_stop_the_launch(tmp_path: Path) -> None:
    """One edited comment in one side's vendored ops is another fingerprint."""
    edited = tmp_path / "edited"
    shutil.copytree(REPOSITORY / "megatron_patch", edited / "megatron_patch")
    op = edited / "megatron_patch" / "ops" / "rope" / "op.py"
    op.write_text(op.read_text() + "# edited\n")
    ended = run_miles(
        "launch",
        "qwen3-tiny",
        *SMALL,
        out=tmp_path / "run",
        env={"PYTHONPATH": f"{edited}:{REPOSITORY}"},
    )
    assert ended.returncode == 3, ended.explain()
    assert "ops_digest" in ended.output and ended.steps == []
