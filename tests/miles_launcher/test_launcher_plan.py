"""The plan as a file: exact round trip, strict reading, nothing overwritten."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from miles_launcher.faults import FINAL_OPS, LAYER_OPS, FaultPlan, parse_fault
from miles_launcher.plan import PLAN_FILE, LaunchPlan, check_out, read, write


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"tp": 2, "inject_fault": "trainer:2:down_proj"},
        {"rollout_tp": 4, "train_tp": 2, "pp": 2, "contract": "qwen3_dense_true_on_policy_v1"},
        {"contract": "off", "overrides": ("run.temperature=0.7", "train.adam_betas=[0.8,0.99]")},
        {"model": "Qwen/Qwen3-32B", "device": "cuda", "overrides": ("cluster.num_gpus=1",)},
    ],
)
def test_json_round_trip(plan_for: Any, arguments: dict[str, Any]) -> None:
    plan = plan_for(**arguments)
    again = LaunchPlan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert isinstance(again.training.adam_betas, tuple)
    # Workers receive the plan by pickle.
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_plan_is_frozen_throughout(plan_for: Any) -> None:
    plan = plan_for()
    for part in (plan, plan.model, plan.layout, plan.policy, plan.run, plan.paths, plan.trainer):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, dataclasses.fields(part)[0].name, None)


def test_floats_survive_exactly(plan_for: Any) -> None:
    plan = plan_for(overrides=("run.temperature=0.1", "train.lr=3.3e-7"))
    again = LaunchPlan.from_json(plan.to_json())
    assert again.run.temperature.hex() == (0.1).hex()
    assert again.training.lr.hex() == (3.3e-7).hex()


def _edited(plan: LaunchPlan, **changes: Any) -> str:
    data = json.loads(plan.to_json())
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = data
        for key in parents:
            node = node[key]
        if value is ...:
            del node[last]
        else:
            node[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"version": 99}, "plan version 99"),
        ({"extra": 1}, r"plan: unknown keys \['extra'\]"),
        ({"layout__tp": 2}, r"plan.layout: unknown keys \['tp'\]"),
        ({"run__seed": ...}, r"plan.run: unknown keys \[\], missing keys \['seed'\]"),
        ({"layout__pp": True}, "plan.layout.pp: expected int, got True"),
        ({"layout__pp": 1.5}, "plan.layout.pp: expected int, got 1.5"),
        ({"device": "tpu"}, "plan.device: 'tpu' is not one of"),
        ({"training__adam_betas": [0.9]}, "plan.training.adam_betas: expected 2 values"),
        ({"policy__row_linears": {}}, "plan.policy.row_linears: expected a list"),
        ({"paths": None}, "plan.paths: expected an object"),
    ],
)
def test_hand_edited_plan_is_read_strictly(
    plan_for: Any, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        LaunchPlan.from_json(_edited(plan_for(), **changes))


def test_write_and_read(plan_for: Any, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    path = write(plan_for(out=out), out)
    assert path == out / PLAN_FILE
    assert read(path) == plan_for(out=out.parent / "other").__class__.from_json(path.read_text())
    assert [entry.name for entry in out.iterdir()] == [PLAN_FILE]


def test_read_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gone.json: cannot read the plan"):
        read(tmp_path / "gone.json")
    (tmp_path / "half.json").write_text('{"version": 1,')
    with pytest.raises(ValueError, match="half.json: "):
        read(tmp_path / "half.json")


def test_out_is_never_overwritten(plan_for: Any, tmp_path: Path) -> None:
    out = tmp_path / "used"
    plan = plan_for(out=out)
    write(plan, out)
    kept = (out / PLAN_FILE).read_bytes()
    with pytest.raises(ValueError, match="not empty; choose another name, or .* --resume"):
        write(plan, out)
    with pytest.raises(ValueError, match="not empty"):
        plan_for(out=out)
    assert (out / PLAN_FILE).read_bytes() == kept
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="this is a file"):
        check_out(tmp_path / "file", False)


def test_resume_continues_the_same_run(plan_for: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(ValueError, match="no plan.json in .*, so there is no run to resume"):
        plan_for(out=out, resume=True)
    write(plan_for(out=out), out)
    resumed = plan_for(out=out, resume=True, steps=9)
    write(resumed, out)
    assert read(out / PLAN_FILE).run.steps == 9
    # The first start's plan is kept.
    assert read(out / "plan-0.json").run.steps == 3
    with pytest.raises(ValueError, match="model: was qwen3-tiny, now qwen3-0.6b"):
        plan_for("qwen3-0.6b", out=out, resume=True)
    with pytest.raises(ValueError, match="--resume needs --out"):
        plan_for(out=None, resume=True)


def test_faults_by_name() -> None:
    assert parse_fault("trainer:2:down_proj", 4) == FaultPlan(
        side="trainer", layer=2, op="down_proj"
    )
    assert parse_fault("rollout:final:lm_head", 4).place == "final:lm_head"
    placed = parse_fault("rollout:1:rope_k:1:7", 4)
    assert (placed.rank, placed.token, placed.place) == (1, 7, "1:rope_k:1:7")
    assert parse_fault("rollout:1:rope_k:0", 4).place == "1:rope_k:0"
    for op in LAYER_OPS:
        assert parse_fault(f"rollout:3:{op}", 4).place == f"3:{op}"
    for op in FINAL_OPS:
        assert parse_fault(f"trainer:final:{op}", 4).layer is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("trainer:2", "write SIDE:LAYER:OP"),
        ("trainer:2:down_proj:1:2:3", "write SIDE:LAYER:OP"),
        ("trainer:2:down_proj:x", "rank 'x' is not a number"),
        ("trainer:2:down_proj:1:-3", "token '-3' is not a number"),
        ("trainer:2:downproj", r"did you mean down_proj or \w+\? ops of layer 2"),
        ("both:2:down_proj", "side 'both' is not one of rollout, trainer"),
        ("trainer:4:down_proj", "layer '4' is not 0 to 3 or 'final'"),
        ("trainer:-1:down_proj", "layer '-1' is not 0 to 3"),
        ("trainer:2:lm_head", "ops of layer 2 are input_layernorm, "),
        (
            "trainer:final:down_proj",
            "ops of 'final' are embedding, final_norm, lm_head, temperature, logprob",
        ),
    ],
)
def test_faults_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_fault(text, 4)


def test_entropy_is_asked_of_layers_that_have_it(plan_for: Any) -> None:
    assert not plan_for().training.entropy
    assert plan_for(overrides=("train.entropy=true",)).training.entropy
    with pytest.raises(ValueError, match="train.entropy=true with contract off"):
        plan_for(overrides=("train.entropy=true",), contract="off")


def test_fault_reaches_the_side_that_is_named(plan_for: Any) -> None:
    rollout = plan_for(inject_fault="rollout:1:rope")
    assert rollout.rollout.engine_kwargs["true_on_policy_fault"] == "1:rope"
    assert rollout.rollout.expected_readback["true_on_policy_fault"] == "1:rope"
    trainer = plan_for(inject_fault="trainer:1:rope")
    assert "true_on_policy_fault" not in trainer.rollout.engine_kwargs
    assert trainer.fault == FaultPlan(side="trainer", layer=1, op="rope")
    with pytest.raises(ValueError, match="rank 2 of a trainer with tensor-parallel size 2"):
        plan_for(inject_fault="trainer:1:rope:2", train_tp=2)
    with pytest.raises(ValueError, match="with contract off the rollout is stock"):
        plan_for(inject_fault="rollout:1:rope", contract="off")
