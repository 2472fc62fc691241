"""The command line as a user meets it: slim, no abbreviations, exit codes, nothing lost."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from miles_launcher import cli, doctor
from miles_launcher.plan import LaunchPlan, read

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ray", "sglang", "megatron", "transformers", "numpy", "tensorboard")


def miles(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), env={"CUDA_VISIBLE_DEVICES": ""})


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("MILES_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["plan", "qwen3-4b", "--tp", "2", "--device", "cpu"],
        ["plan", "qwen3-tiny", "--json", "--inject-fault", "trainer:1:rope"],
        ["plan", "nope"],
        ["contracts"],
        ["profiles"],
        ["launch", "qwen3-tiny", "--dry-run", "--device", "cpu"],
    ],
)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    """A fresh interpreter, because this one has imported torch already."""
    code = (
        "import sys\n"
        "from miles_launcher import cli\n"
        f"sys.argv = ['miles', *{arguments!r}]\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        f"loaded = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "print('LOADED', loaded, file=sys.stderr)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert "LOADED []" in done.stderr, done.stderr


def test_help_names_every_command_and_flag() -> None:
    text = miles("--help").output
    for command in ("plan", "launch", "parity", "contracts", "profiles", "doctor"):
        assert command in text
    flags = miles("launch", "--help").output
    for flag in (
        "--tp --rollout-tp --train-tp --pp --cp --contract --segments --device --model-path "
        "--prompts --reward --steps --out --dry-run --resume --inject-fault"
    ).split():
        assert flag in flags
    assert "--force" not in flags


def test_plan_json_is_the_plan() -> None:
    result = miles("plan", "Qwen3-4B", "--tp", "2", "--json", "run.temperature=0.7")
    assert result.exit_code == 0, result.output
    plan = LaunchPlan.from_json(result.stdout)
    assert plan.model.name == "qwen3-4b" and plan.layout.train_tp == 2
    assert plan.run.temperature == 0.7
    assert not Path(plan.paths.out).exists()


def test_plan_table_shows_the_order_of_the_sums() -> None:
    text = miles("plan", "qwen3-tiny", "--rollout-tp", "4", "--train-tp", "2").output
    for part in ("Plan", "qwen3-tiny", "down_proj", "1536", "segments", "tp_size", "Megatron"):
        assert part in text
    assert "2 tp x 1 pp x 1 cp = 2 ranks" in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["plan", "nope"], "unknown model 'nope'"),
        (["plan", "qwen3-tiny", "--contract", "x"], "unknown contract 'x'"),
        (["plan", "qwen3-30b-a3b"], "does not cover family qwen3_moe"),
        (["plan", "qwen3-tiny", "--device", "gpu"], "choose from auto, cpu, cuda"),
        (["plan", "qwen3-tiny", "stray"], "unexpected argument 'stray'"),
        (["launch", "qwen3-tiny", "run.top_k=5"], "run.top_k=5 renormalises"),
        (["launch", "qwen3-tiny", "--steps", "0"], "run.steps=0 must be positive"),
        (["launch", "qwen3-tiny", "--reward", "absent_module:f"], "importing absent_module failed"),
        (["launch", "qwen3-tiny", "--prompts", "gone.jsonl"], "cannot read the prompts"),
        (["launch", "qwen3-tiny", "--model-path", "gone"], "is this a model folder"),
        (["launch", "qwen3-tiny", "--resume"], "--resume needs --out"),
        (["parity", "qwen3-tiny", "--inject-fault", "x:1:rope"], "side 'x' is not one of"),
    ],
)
def test_configuration_errors_exit_2_without_a_traceback(
    arguments: list[str], complaint: str, tmp_path: Path
) -> None:
    result = miles(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "flag", ["--t", "--rollout", "--train", "--dev", "--seg", "--dry", "--force", "--tpp", "-tp"]
)
def test_no_abbreviated_or_unknown_flags(flag: str) -> None:
    result = miles("launch", "qwen3-tiny", flag, "2")
    assert result.exit_code == 2
    assert "No such option" in result.output


def test_flag_values_are_typed() -> None:
    result = miles("plan", "qwen3-tiny", "--tp", "two")
    assert result.exit_code == 2 and "Invalid value for '--tp'" in result.output


def test_all_violations_are_printed() -> None:
    result = miles("plan", "qwen3-tiny", "--tp", "3", "--pp", "3", "--segments", "5")
    assert result.exit_code == 2
    for part in ("--rollout-tp=3", "--train-tp=3", "num_hidden_layers=4", "--segments=5"):
        assert part in result.stderr
    for part in ("o_proj: K=512", "num_attention_heads=8", "num_key_value_heads=4"):
        assert part in result.stderr
    assert result.stderr.count("\n  - ") >= 10


def test_dry_run_writes_the_plan_and_stops(tmp_path: Path) -> None:
    result = miles("launch", "qwen3-tiny", "--dry-run", "--device", "cpu", "--out", "here")
    assert result.exit_code == 0, result.output
    assert read(tmp_path / "here" / "plan.json").paths.out == str(tmp_path / "here")
    again = miles("launch", "qwen3-tiny", "--dry-run", "--device", "cpu", "--out", "here")
    assert again.exit_code == 2 and "not empty" in again.stderr


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, bool]]:
    """A stand-in for the runtime: records what it is started with, and returns 3."""
    calls: list[tuple[Path, bool]] = []

    def run_launch(plan_path: Path, parity_only: bool, bisect_on_mismatch: bool) -> int:
        assert not bisect_on_mismatch
        calls.append((plan_path, parity_only))
        return 3

    module = types.ModuleType("miles_launcher.runtime.driver")
    module.run_launch = run_launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "miles_launcher.runtime.driver", module)
    package = types.ModuleType("miles_launcher.runtime")
    package.driver = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "miles_launcher.runtime", package)
    return calls


def test_launch_starts_from_the_written_plan(driver: Any, tmp_path: Path) -> None:
    result = miles("launch", "qwen3-tiny", "--device", "cpu", "--tp", "2")
    assert result.exit_code == 3, result.output
    ((path, parity_only),) = driver
    assert path.parent.parent == tmp_path / "runs" and not parity_only
    assert read(path).layout.rollout_tp == 2


def test_parity_runs_one_round(driver: Any) -> None:
    result = miles("parity", "qwen3-tiny", "--device", "cpu", "--rollout-tp", "2")
    assert result.exit_code == 3, result.output
    ((path, parity_only),) = driver
    assert parity_only and read(path).run.steps == 1


def test_lists() -> None:
    contracts = miles("contracts").output
    assert "qwen3_dense_true_on_policy_v1" in contracts and "(default)" in contracts
    profiles = miles("profiles").output
    assert "qwen3-32b" in profiles and "none covers qwen3_moe" in profiles


def _without_engines(monkeypatch: pytest.MonkeyPatch, **rows: Any) -> None:
    monkeypatch.setattr(doctor, "_hook_targets", lambda: [rows["hook"]])
    monkeypatch.setattr(doctor, "_megatron_layers", list)
    monkeypatch.setattr(doctor, "_entry_point", lambda group, name: rows["hook"])


def test_doctor_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    good = doctor.Check(name="hook x", ok=True, detail="unchanged")
    _without_engines(monkeypatch, hook=good)
    result = miles("doctor")
    assert result.exit_code == 0, result.output
    assert "0.5.17" in result.output and "broken" not in result.output
    _without_engines(monkeypatch, hook=doctor.Check(name="hook x", ok=False, detail="changed"))
    result = miles("doctor")
    assert result.exit_code == 1 and "broken" in result.output


def test_doctor_reports_what_fails_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = types.ModuleType("sglang_patch.plugin")
    row = types.SimpleNamespace(target="a.b", found=True, unchanged=False, detail="digest 1, was 2")
    plugin.check_targets = lambda: [row]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang_patch.plugin", plugin)
    (check,) = doctor._guarded("hooks", doctor._hook_targets)
    assert not check.ok and check.detail == "changed: digest 1, was 2"

    def raises() -> list[doctor.Check]:
        raise ImportError("no module")

    (check,) = doctor._guarded("hooks", raises)
    assert not check.ok and check.detail == "ImportError: no module"
    assert not doctor._version("sglang", "0.0.1").ok
    assert not doctor._version("surely-not-installed-here", "1").ok
    assert not doctor._entry_point("sglang.srt.plugins", "surely_not_registered").ok


def test_pins_are_the_pyproject() -> None:
    """Where this distribution pins a release too, both say the same."""
    project = tomllib.loads((ROOT / "miles_launcher" / "pyproject.toml").read_text())["project"]
    pinned = dict(d.split("==") for d in project["dependencies"] if "==" in d)
    assert pinned and pinned.items() <= doctor.PINS.items()
