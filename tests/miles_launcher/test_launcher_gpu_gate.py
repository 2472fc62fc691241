"""The gate's runner without an engine: what closes it, what is kept, what its exit codes say."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles_launcher.gpu_gate import __main__ as command
from miles_launcher.gpu_gate import machine
from miles_launcher.gpu_gate.configurations import ALL, Configuration, select
from miles_launcher.gpu_gate.results import (
    ConfigurationResult,
    GroupResult,
    cross_checks,
    read_result,
    reusable,
)
from miles_launcher.gpu_gate.run import (
    CLOSED,
    DIED,
    EXACT,
    INCOMPLETE,
    NOT_RUN,
    Gate,
    GateOptions,
    launch_args,
)
from miles_launcher.gpu_gate.sizes import FULL, prompt
from miles_launcher.plan import LaunchPlan
from miles_launcher.resolve import resolve

Outcome = Callable[[str, str], GroupResult | None]


class FakeSession:
    """A configuration's process that has ended: its file holds what `outcome` says."""

    def __init__(self, outcome: Outcome, ended: str = "complete", code: int = 0) -> None:
        self.outcome, self.ended, self.returncode = outcome, ended, code
        self.started: list[tuple[str, tuple[str, ...]]] = []

    def __call__(
        self, plan: LaunchPlan, out: Path, which: Configuration, groups: Sequence[str], sizes: str
    ) -> Any:
        self.started.append((which.name, tuple(groups)))
        result = read_result(out, which.name)
        assert result is not None
        found = [self.outcome(which.name, group) for group in groups]
        result.groups += [group for group in found if group is not None]
        result.ended = self.ended
        result.write(out)
        folder = Path(plan.paths.out)
        folder.mkdir(parents=True)
        (folder / "session.log").write_text("the end of a log\n")
        return self

    def poll(self) -> int:
        return self.returncode


def exact(name: str, group: str) -> GroupResult:
    control = group in ("parity", "bisect")
    return GroupResult(
        name=group, control=control, compared_tokens=20, mismatched_tokens=int(control), digest="d"
    )


def options(tmp_path: Path, **changes: Any) -> GateOptions:
    return replace(
        GateOptions(
            model="qwen3-tiny",
            device="cpu",
            gpus=0,
            out=tmp_path / "out",
            scratch=tmp_path / "scratch",
            min_tokens=16,
            small=True,
        ),
        **changes,
    )


def run(
    tmp_path: Path, session: FakeSession, *only: str, **changes: Any
) -> tuple[int, dict[str, Any], list[str]]:
    said: list[str] = []
    chosen = select(4, only or ("tp1", "contract-off"), cpu=True)
    code = Gate(options(tmp_path, **changes), chosen, say=said.append, start=session).run()
    return code, json.loads((tmp_path / "out" / "gate.json").read_text()), said


def test_all_exact_and_the_control_different(tmp_path: Path) -> None:
    code, index, _ = run(tmp_path, FakeSession(exact))
    assert code == EXACT == index["exit_code"] and index["closed_by"] == []
    named = {entry["name"]: entry for entry in index["configurations"]}
    assert len(named) == 8 and named["contract-off:parity"]["control"] is True
    wanted = {"layout", "contract", "compared_tokens", "mismatched_tokens", "max_abs_diff"}
    assert wanted | {"control", "versions", "seconds"} <= named["tp1:prompts"].keys()
    assert named["tp1:prompts"]["layout"]["rollout_tp"] == 1


@pytest.mark.parametrize(
    ("where", "change", "said"),
    [
        ("tp1:cache", {"mismatched_tokens": 1}, "1 of 20 tokens differ"),
        ("tp1:cache", {"compared_tokens": 15}, "15 tokens compared, at least 16"),
        ("tp1:cache", {"compared_tokens": 0}, "0 tokens compared"),
        ("tp1:cache", {"failures": ["cached tokens 3, expected 4"]}, "cached tokens 3"),
        ("contract-off:parity", {"mismatched_tokens": 0}, "a control is exact over 20 tokens"),
        ("contract-off:parity", {"compared_tokens": 0}, "a control compared no token"),
    ],
)
def test_what_closes_the_gate(
    where: str, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    def outcome(name: str, group: str) -> GroupResult:
        found = exact(name, group)
        return replace(found, **change) if f"{name}:{group}" == where else found

    code, index, _ = run(tmp_path, FakeSession(outcome))
    assert code == CLOSED == index["exit_code"]
    (reason,) = index["closed_by"]
    assert reason.startswith(where) and said in reason


def test_a_process_that_died_is_exit_code_4_and_quoted(tmp_path: Path) -> None:
    session = FakeSession(lambda name, group: None, ended="running", code=-9)
    code, index, said = run(tmp_path, session, "tp1", "tp2")
    # Nothing at all was compared, which is the worse news.
    assert code == CLOSED and "no token was compared" in index["closed_by"][0]
    assert len(index["died"]) == 2

    def half(name: str, group: str) -> GroupResult | None:
        return exact(name, group) if group == "prompts" else None

    code, index, _ = run(tmp_path, FakeSession(half, ended="running", code=-9), "tp1")
    assert code == DIED and "did not run" in index["died"][0]
    kept = read_result(tmp_path / "out", "tp1")
    assert kept is not None and kept.message == "the end of a log\n"


def test_a_gate_that_closed_before_the_first_group(tmp_path: Path) -> None:
    session = FakeSession(lambda name, group: None, ended="gate closed", code=3)
    code, index, _ = run(tmp_path, session, "tp1")
    assert code == CLOSED and any(r.startswith("tp1:prompts") for r in index["closed_by"])


def test_a_second_run_keeps_what_was_whole(tmp_path: Path) -> None:
    def first(name: str, group: str) -> GroupResult:
        found = exact(name, group)
        return replace(found, mismatched_tokens=2) if group == "chunks" else found

    assert run(tmp_path, FakeSession(first), "tp1")[0] == CLOSED
    again = FakeSession(exact)
    code, index, said = run(tmp_path, again, "tp1")
    assert code == EXACT and again.started == [("tp1", ("chunks",))]
    assert "tp1:prompts: kept from an earlier run" in said
    assert len(index["configurations"]) == 7
    idle = FakeSession(exact)
    assert run(tmp_path, idle, "tp1")[0] == EXACT and idle.started == []


@pytest.mark.parametrize("changed", ["source", "versions", "overrides"])
def test_results_of_other_text_or_releases_are_not_kept(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, FakeSession(exact), "tp1")
    if changed == "source":
        monkeypatch.setattr(machine, "source_digest", lambda: "another text")
    if changed == "versions":
        monkeypatch.setattr(machine, "versions", lambda: {"torch": "0"})
    if changed == "overrides":
        result = read_result(tmp_path / "out", "tp1")
        assert result is not None
        identity = {**result.identity, "overrides": ["run.steps=2"]}
        assert reusable(result, result.identity, 16) and not reusable(result, identity, 16)
        return
    again = FakeSession(exact)
    run(tmp_path, again, "tp1")
    assert len(again.started[0][1]) == 7


def test_without_time_nothing_is_started(tmp_path: Path) -> None:
    session = FakeSession(exact)
    run(tmp_path, session, "tp1")
    code, index, _ = run(tmp_path, session, "tp1", "tp2", seconds=1.0)
    assert code == INCOMPLETE and len(session.started) == 1
    assert [entry["name"] for entry in index["not_run"]] == ["tp2"]


def test_a_layout_that_the_contract_refuses_is_said_and_closes_nothing(tmp_path: Path) -> None:
    chosen = [*select(4, ("tp1",), cpu=True)]
    chosen.append(replace(chosen[0], name="tp3", layout=replace(chosen[0].layout, train_tp=3)))
    gate = Gate(options(tmp_path), chosen, say=lambda text: None, start=FakeSession(exact))
    assert gate.run() == EXACT
    (entry,) = gate.not_run
    assert entry["name"] == "tp3" and "not a power of two" in entry["reason"]


def result(which: str, order: str = "segments=2", **group: Any) -> ConfigurationResult:
    return ConfigurationResult(
        name=which,
        layout={},
        contract="v2",
        control=False,
        identity={"model": "m", "order": order},
        versions={},
        groups=[GroupResult(control=False, **group)],
    )


def test_configurations_of_the_same_numbers_must_sample_the_same() -> None:
    same = [result(name, name="prompts", digest="a") for name in ("tp2", "engines2")]
    (check,) = cross_checks(same)
    assert check["ok"]
    (check,) = cross_checks([*same, result("pp2", name="prompts", digest="b")])
    assert not check["ok"] and "pp2 b" in check["detail"]
    assert cross_checks([same[0], result("tp1", "segments=1", name="prompts", digest="b")]) == []


@pytest.mark.parametrize(("other", "ok"), [(3.0 + 2**-21, True), (3.0 + 2**-17, False)])
def test_the_gradient_norm_is_one_number(other: float, ok: bool) -> None:
    pair = [
        result(name, name="training", facts={"grad_norm": norm})
        for name, norm in (("tp2", 3.0), ("rollout2-train1", other))
    ]
    (check,) = cross_checks(pair)
    assert check["ok"] is ok


def test_selection() -> None:
    assert [c.name for c in select(1)] == [
        "tp1",
        "tp1-all-off",
        "contract-off",
        "stock-on-policy-target",
        "tp1-v1",
    ]
    assert "stock-on-policy-target" not in [c.name for c in select(1, cpu=True)]
    assert {c.gpus for c in select(2)} == {1, 2} and len(select(4)) == len(ALL)
    (short,) = select(1, ("tp1",), ("prompts",))
    assert short.groups == ("prompts",)
    for wrong, said in [
        ({"gpus": 1, "only": ("tp2",)}, "there are 1 GPUs"),
        ({"gpus": 1, "only": ("tp9",)}, "unknown configurations tp9"),
        ({"gpus": 1, "groups": ("parity",)}, "unknown groups parity"),
        ({"gpus": 9, "only": ("stock-on-policy-target",), "cpu": True}, "a CPU cannot"),
    ]:
        with pytest.raises(ValueError, match=said):
            select(**wrong)  # type: ignore[arg-type]


def test_every_configuration_plans_for_a_gpu(tmp_path: Path) -> None:
    """With the real model; what v1 refuses on this layout may be refused, nothing else."""
    gpu = options(tmp_path, model="qwen3-4b", device="cuda", small=False)
    for configuration in ALL:
        args = launch_args(configuration, gpu, tmp_path / configuration.name)
        try:
            plan = resolve(args, {"RAY_ADDRESS": "auto", "MILES_HOME": "/models"})
        except ValueError:
            if not configuration.contract.endswith("_v1"):
                raise
            continue
        assert plan.engine.cuda_graph is not any("cuda_graph" in o for o in args.overrides)
        assert plan.layout.gpus(True, plan.engine.num_engines) == configuration.gpus


def test_the_full_sizes_are_what_the_gate_claims() -> None:
    sizes = FULL
    assert min(sizes.prompt_lengths) == 9 and 4097 in sizes.prompt_lengths
    counts = {
        "prompts": len(sizes.prompt_lengths) * sizes.samples * sizes.new_tokens,
        "micro_batches": len(sizes.prompt_lengths) // 2 * 2 * sizes.samples * sizes.new_tokens,
        "cache": 3 * len(sizes.hit_lengths) * sizes.new_tokens,
        "chunks": (2 * sizes.samples + 1) * len(sizes.chunk_lengths) * sizes.new_tokens,
        "batch_sizes": sum(sizes.batch_sizes) * sizes.batch_new_tokens,
    }
    assert all(count >= sizes.min_tokens == 4096 for count in counts.values()), counts
    assert prompt(5, 100, "a", 1) == prompt(5, 100, "a", 1) != prompt(5, 100, "a", 2)


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "visible_gpus", lambda: 0)
    assert command.main([]) == NOT_RUN
    assert "not run: no GPU" in capsys.readouterr().err
    assert command.main(["--device", "cpu", "--min-tokens", "0"]) == NOT_RUN
    assert "zero tokens show nothing" in capsys.readouterr().err
    assert command.main(["--list"]) == 0
    assert "engines2: 2 GPUs" in capsys.readouterr().out
