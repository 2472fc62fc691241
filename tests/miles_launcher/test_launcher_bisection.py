"""What `miles bisect` plans, from what was typed or a batch that was kept; half-written files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from miles_launcher.bisection import ENGINES, PHASES, bisection_plan, replay_command
from miles_launcher.mismatch import (
    MISMATCH_FILE,
    WEIGHTS_FOLDER,
    read_mismatch,
    write_mismatch,
)
from miles_launcher.parity.gate import GateClosed
from miles_launcher.parity.report import StepReport
from miles_launcher.plan import LaunchPlan, write
from miles_launcher.resolve import LaunchArgs, resolve
from miles_launcher.runtime.batch import Batch
from miles_launcher.runtime.driver import _after_mismatch, new_report
from miles_launcher.runtime.dumps import read_dump
from miles_launcher.runtime.loop import Loop
from miles_launcher.runtime.passes import _KEPT_BYTES, _MAX_KEPT, Passes, row_bytes
from miles_launcher.runtime.progress import Progress
from miles_launcher.runtime.rollout import flush_cache
from miles_launcher.seeded_weights import ensure_seeded_weights

BATCH = {"tokens": [[1, 2, 3]], "prompt_lengths": [1], "response_lengths": [2]}
LOGPROBS = ([np.array([-1.5, -2.0], np.float32)], [np.array([-1.5, -2.5], np.float32)])


def args(**given: Any) -> LaunchArgs:
    return LaunchArgs(**{"model": "qwen3-tiny", "device": "cpu", **given})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchPlan:
    """The plan of a run, in its folder, whose gate closed."""
    monkeypatch.setenv("MILES_HOME", str(tmp_path / "home"))
    plan = resolve(
        args(
            rollout_tp=2,
            train_tp=1,
            cp=2,
            contract="qwen3_dense_true_on_policy_v2",
            segments=8,
            out=tmp_path / "run",
            inject_fault="trainer:2:silu_mul",
            overrides=("run.temperature=0.7", "run.max_new_tokens=9", "run.steps=4", "run=learn"),
        )
    )
    write(plan, Path(plan.paths.out))
    return plan


def close(plan: LaunchPlan, weights: Path | str, step: int = 0) -> Path:
    out = Path(plan.paths.out)
    write_mismatch(out, step, BATCH, LOGPROBS, Path(weights))
    return out


def test_one_step_without_graphs_of_the_settings_that_were_typed(tmp_path: Path) -> None:
    typed = args(tp=2, out=tmp_path / "run", overrides=("run.steps=7", "run.temperature=0.7"))
    plan, sides, swept = bisection_plan(typed, "rollout,trainer")
    assert (sides, swept) == (ENGINES, ())
    assert plan.run.steps == 1 and plan.run.temperature == 0.7
    assert plan.engine.cuda_graph is False
    plan, sides, swept = bisection_plan(args(), "decode,prefill", sweep="both")
    assert sides == swept == PHASES
    assert bisection_plan(args(), "rollout,trainer", sweep="trainer")[2] == ("trainer",)


def test_a_replay_has_the_settings_of_its_run_and_the_weights_of_its_step(
    run: LaunchPlan, tmp_path: Path
) -> None:
    out = close(run, run.paths.model_path)
    plan, _, _ = bisection_plan(
        LaunchArgs(model="", out=tmp_path / "again"), "rollout,trainer", out
    )
    assert plan.layout == run.layout and plan.segments == 8 and plan.fault == run.fault
    assert plan.run.temperature == 0.7 and plan.run.max_new_tokens == 9
    assert plan.paths.model_path == run.paths.model_path and plan.paths.seeded
    assert plan.engine.cuda_graph is False and plan.run.steps == 1

    kept = out / WEIGHTS_FOLDER
    close(run, kept, step=2)
    with pytest.raises(ValueError, match="weights of step 2 are not there any more"):
        bisection_plan(LaunchArgs(model=""), "rollout,trainer", out)
    ensure_seeded_weights(run.model, 4, kept)
    plan, _, _ = bisection_plan(
        LaunchArgs(model="", out=tmp_path / "again"), "rollout,trainer", out
    )
    assert plan.paths.model_path == str(kept) and not plan.paths.seeded


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"between": "decode,prefil"}, "did you mean decode,prefill"),
        ({"between": "nonsense"}, r"choices: rollout,trainer or decode,prefill"),
        ({"sweep": "decode"}, r"--sweep 'decode' \(choices: both, rollout, trainer\)"),
        ({"args": LaunchArgs(model="")}, "name a model, or a run whose gate closed"),
        ({"args": args(contract="off")}, "stock layers have no taps"),
        (
            {"args": args(inject_fault="trainer:0:rope"), "sweep": "both"},
            "--sweep: both sides would have",
        ),
        (
            {"args": args(inject_fault="rollout:0:rope"), "between": "decode,prefill"},
            "decode,prefill: both sides would have",
        ),
    ],
)
def test_what_cannot_be_bisected_is_said(given: dict[str, Any], message: str) -> None:
    values = {"args": args(), "between": "rollout,trainer", **given}
    with pytest.raises(ValueError, match=message):
        bisection_plan(values.pop("args"), **values)


def test_a_replay_takes_no_other_model_or_flags(run: LaunchPlan) -> None:
    out = close(run, run.paths.model_path)
    with pytest.raises(ValueError, match="leave out qwen3-tiny, tp, device"):
        bisection_plan(args(tp=2), "rollout,trainer", out)
    with pytest.raises(ValueError, match="--sweep needs no batch of another run"):
        bisection_plan(LaunchArgs(model=""), "rollout,trainer", out, "both")


def test_a_missing_or_half_written_mismatch_is_an_error_that_names_it(run: LaunchPlan) -> None:
    out = Path(run.paths.out)
    path = out / MISMATCH_FILE
    with pytest.raises(ValueError, match=rf"{path}: cannot read it .* only a run whose gate clos"):
        bisection_plan(LaunchArgs(model=""), "rollout,trainer", out)
    close(run, run.paths.model_path)
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=rf"{path}: not a whole file"):
        read_mismatch(out)
    path.write_text(json.dumps({k: v for k, v in json.loads(whole).items() if k != "weights"}))
    with pytest.raises(ValueError, match="no weights"):
        read_mismatch(out)
    path.write_text("[]")
    with pytest.raises(ValueError, match="not a mismatch of this version: no step, tokens"):
        read_mismatch(out)
    assert not list(out.glob("*.tmp"))


def test_a_missing_or_half_written_record_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.pt"
    with pytest.raises(ValueError, match=rf"{path}: missing; this rank left no record"):
        read_dump(path)
    dump = {"passes": {"tokens": [torch.zeros(2, 2)]}, "taps": {"a": {"whole": True}}, "rows": {}}
    torch.save(dump, path)
    found = read_dump(path)
    assert isinstance(found["passes"]["tokens"][0], np.ndarray) and found["taps"]["a"]["whole"]
    whole = path.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=rf"{path}: not a whole record of taps"):
            read_dump(path)


def test_the_stored_rows_of_a_large_model_stay_within_their_budget() -> None:
    model = resolve(args(model="qwen3-4b")).model
    tokens = min(_MAX_KEPT, _KEPT_BYTES // row_bytes(model))
    assert 16 <= tokens <= 64
    assert tokens * row_bytes(model) <= 256 << 20


def test_the_command_survives_a_space_in_the_path() -> None:
    assert replay_command(Path("/a b/run")) == "miles bisect --replay '/a b/run'"


class _Busy:
    """An engine that refuses to empty its cache a number of times, as SGLang does while it runs."""

    def __init__(self, refusals: int) -> None:
        self.refusals, self.asked = refusals, 0

    def flush_cache(self) -> Any:
        self.asked += 1
        return SimpleNamespace(success=self.asked > self.refusals, message="not idle")


def test_the_cache_is_emptied_once_the_engine_is_idle_or_the_run_ends() -> None:
    busy = _Busy(3)
    flush_cache(busy)
    assert busy.asked == 4
    with pytest.raises(RuntimeError, match="did not empty its cache in 0 s: not idle"):
        flush_cache(_Busy(1 << 30), patience=0.1)


class _Fixed:
    """Two sides that return the same logprobs again and again; a loop and a session in one."""

    context_length = 4

    def __init__(self, ours: list[float], theirs: list[float]) -> None:
        self.ours, self.theirs = ours, theirs

    def sample(self, step: int, names: Any) -> Any:
        ids = tuple(range(2, 2 + len(self.ours)))
        generation = SimpleNamespace(response_ids=ids, logprobs=self.ours)
        batch = Batch(tokens=[[1, *ids]], prompt_lengths=[1], response_lengths=[len(self.ours)])
        return [0], [generation], batch

    def score(self, batch: Batch) -> list[Any]:
        return [np.asarray(self.theirs, np.float32)]


def passes(ours: list[float], theirs: list[float], between: Any = ENGINES) -> Passes:
    both: Any = _Fixed(ours, theirs)
    made = Passes(both, both, 0, between)
    made.plain()
    return made


def test_equal_taps_are_not_enough_where_the_returned_logprobs_differ() -> None:
    passes([-1.5, -2.0], [-1.5, -2.0]).check_returned()
    one_ulp = float(np.nextafter(np.float32(-2.0), np.float32(0)))
    with pytest.raises(GateClosed, match="and yet 1 of 2 returned logprobs do"):
        passes([-1.5, -2.0], [-1.5, one_ulp]).check_returned()
    with pytest.raises(GateClosed, match="0 and 0 returned logprobs: nothing is shown"):
        passes([], []).check_returned()


def test_a_prefill_that_does_not_fit_is_refused_before_the_engine_sees_it() -> None:
    with pytest.raises(ValueError, match="a prefill of 4 tokens needs one more in a context of 4"):
        passes([-1.0, -2.0, -3.0], [], PHASES)


def test_a_batch_that_cannot_be_kept_leaves_the_gate_closed(
    run: LaunchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens that differ are the end of the run, not the disk that was full after it."""
    loop = object.__new__(Loop)
    report: Any = SimpleNamespace(steps=[])
    loop._report = report
    rollout, scores = [np.array([-1.0], np.float32)], [np.array([-2.0], np.float32)]
    generation: Any = SimpleNamespace(response_ids=(7,))

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Loop, "_keep_batch", full)
    batch = Batch(tokens=[[1, 7]], prompt_lengths=[1], response_lengths=[1])
    with pytest.raises(GateClosed, match="1 of 1 tokens differ.*could not be kept: no space left"):
        loop._gate(StepReport(step=0), batch, [generation], rollout, scores)
    assert report.steps[0].mismatched_tokens == 1


def test_a_bisection_that_cannot_start_leaves_the_run_its_end(
    run: LaunchPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    """No mismatch was kept: that is said, nothing is raised over the report's exit code."""
    report = new_report(run)
    report.steps.append(StepReport(step=0, mismatched_tokens=1))
    _after_mismatch(report, Progress(report), Path(run.paths.out), True)
    said = capsys.readouterr().out
    assert "miles bisect --replay" in said and "not bisected: " in said and MISMATCH_FILE in said
