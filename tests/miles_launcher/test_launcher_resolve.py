"""What was typed: settings and flags compose, and every bad input has a clear error."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from miles_launcher import policy
from miles_launcher import resolve as resolving
from miles_launcher.conf import CONF_DIR, compose_settings, setting_keys
from miles_launcher.devices import resolve_device, visible_gpus
from miles_launcher.layout import LayoutError
from miles_launcher.runtime.trainer import rank_config
from miles_launcher.settings import Settings
from sglang_patch.ops.attention.op import FLASH3_HEAD_DIM, PATHS, gpu_path


@pytest.mark.parametrize("group", ["layout", "contract", "run"])
def test_every_group_file_composes_and_resolves(plan_for: Any, group: str) -> None:
    choices = [path.stem for path in sorted((CONF_DIR / group).glob("*.yaml"))]
    assert len(choices) >= 3
    for choice in choices:
        plan = plan_for(overrides=(f"{group}={choice}",))
        assert plan.overrides == (f"{group}={choice}",)


def test_yaml_adds_nothing_to_the_schema() -> None:
    """The tiny model's YAML with no override differs from the schema's defaults in sizes only."""
    tiny, schema = compose_settings("qwen3-tiny"), Settings()
    assert (tiny.layout, tiny.contract, tiny.train) == (
        schema.layout,
        schema.contract,
        schema.train,
    )


def test_overrides_and_flags(plan_for: Any) -> None:
    plan = plan_for(
        "qwen3-4b",
        overrides=("run.temperature=0.7", "train.lr=1e-3", "layout=tp2", "train.recompute=none"),
        steps=5,
    )
    assert plan.run.temperature == 0.7 and plan.run.steps == 5
    assert plan.training.lr == 1e-3 and plan.training.recompute == "none"
    assert (plan.layout.rollout_tp, plan.layout.train_tp) == (2, 2)
    # Flags win over a group choice; the other degrees of the group stay.
    assert plan_for(overrides=("layout=tp2_pp2",), tp=1).layout.pp == 2


def test_paths_with_grammar_characters_survive(plan_for: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "a=b, {c} 'd'.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    assert plan_for(prompts=str(prompts)).paths.prompts == str(prompts)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("run.temprature=0.7", "unknown setting 'run.temprature'.*did you mean run.temperature"),
        ("bogus=1", "unknown setting 'bogus'"),
        ("+run.extra=1", r"unknown setting '\+run.extra'"),
        ("~run.steps=1", "unknown setting '~run.steps'"),
        ("hydra.run.dir=/x", "unknown setting 'hydra.run.dir'"),
        ("run.steps=abc", "run.steps=abc.*could not be converted to Integer"),
        ("run.steps=1,2", "Ambiguous value"),
        ("run.steps=null", "not Optional"),
        ("run=nope", "Could not find 'run/nope'.*learn.*parity.*train"),
        ("layout=tp3", "Available options in 'layout'"),
        ("leftover", "unexpected argument 'leftover': a setting is written key=value"),
        ("model=qwen3-8b", "the model is the first argument"),
        ("model.name=qwen3-8b", "the model is the first argument"),
    ],
)
def test_bad_overrides(plan_for: Any, override: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        plan_for(overrides=(override,))


def test_given_twice(plan_for: Any) -> None:
    with pytest.raises(ValueError, match="'run.steps' is given twice"):
        plan_for(overrides=("run.steps=1", "run.steps=2"))
    with pytest.raises(ValueError, match=r"'run.steps' is set by a flag \(4\) and again"):
        plan_for(overrides=("run.steps=1",), steps=4)
    with pytest.raises(ValueError, match="--tp sets both degrees"):
        plan_for(tp=2, train_tp=2)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("run.top_p=0.9", "run.top_p=0.9 renormalises over the nucleus.*needs run.top_p=1.0"),
        ("run.top_k=50", "run.top_k=50 renormalises.*needs run.top_k=-1"),
        ("run.min_p=0.1", "run.min_p=0.1 renormalises"),
        ("run.repetition_penalty=1.1", "rescales the logits.*run.repetition_penalty=1.0"),
        ("run.frequency_penalty=0.5", "shifts the logits"),
        ("run.presence_penalty=-0.5", "shifts the logits"),
        ("run.temperature=0", "run.temperature=0.0 must be a positive number"),
        ("run.temperature=inf", "run.temperature=inf must be"),
        ("run.logprob_source=guess", "run.logprob_source='guess': choose from decode"),
        ("run.steps=0", "run.steps=0 must be positive"),
        ("run.prompts_per_step=-1", "run.prompts_per_step=-1 must be positive"),
        ("train.micro_batch_tokens=-1", "micro_batch_tokens=-1 must be 0"),
        ("train.micro_batch_size=5", "micro_batch_size=5 does not divide the 4 x 4 = 16 seq"),
        ("train.lr=-1", "train.lr=-1.0 must be a finite number"),
        ("train.lr=nan", "train.lr=nan must be a finite number"),
        ("train.adam_betas=[0.9,1.0]", r"train.adam_betas=\[0.9, 1.0\] must both be in"),
        ("train.adam_eps=0", "train.adam_eps=0.0 must be positive"),
        ("train.recompute=some", "train.recompute='some': choose from none, full"),
        ("rollout.mem_fraction_static=1.5", "must be between 0 and 1"),
        ("rollout.num_engines=0", "rollout.num_engines=0 must be positive"),
        ("rollout.num_engines=17", "17 engines share the 16 sequences"),
        ("rollout.stock_on_policy_target=fsdp", "use it with --contract off"),
        ("rollout.chunked_prefill_size=0", "must be positive, or -1"),
        ("rollout.context_length=5000", "context_length=5000 exceeds max_position_embeddings=4096"),
        ("run.max_new_tokens=4096", "leaves no room for a prompt in a context of 4096 tokens"),
        ("cluster.num_gpus=-1", "cluster.num_gpus=-1 must be 0 or more"),
        ("device=tpu", "device='tpu': choose from auto, cpu, cuda"),
    ],
)
def test_bad_values(plan_for: Any, override: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plan_for(overrides=(override,))


def test_all_bad_sampling_values_at_once(plan_for: Any) -> None:
    with pytest.raises(ValueError, match="parity needs") as caught:
        plan_for(overrides=("run.top_p=0.9", "run.top_k=5", "run.min_p=0.2"))
    assert str(caught.value).count("parity needs") == 3


def test_unknown_names(plan_for: Any) -> None:
    with pytest.raises(ValueError, match="unknown model 'qwen9'.*choices: qwen3-tiny, "):
        plan_for("qwen9")
    with pytest.raises(ValueError, match="unknown contract 'v9'; choose one of: qwen3_dense_"):
        plan_for(contract="v9")
    with pytest.raises(ValueError, match="does not cover family qwen3_moe"):
        plan_for("Qwen/Qwen3-30B-A3B")
    with pytest.raises(ValueError, match="unknown built-in prompts 'x'; choose from lowercase"):
        plan_for(prompts="builtin:x")
    with pytest.raises(ValueError, match="unknown built-in reward 'x'; choose from lowercase"):
        plan_for(reward="builtin:x")
    with pytest.raises(ValueError, match="write module:function"):
        plan_for(reward="score.py")


def test_impossible_layout_carries_its_violations(plan_for: Any) -> None:
    with pytest.raises(LayoutError) as caught:
        plan_for(pp=3, cp=3)
    assert len(caught.value.violations) >= 3
    with pytest.raises(LayoutError, match="needs 2 GPUs .* 0 available"):
        plan_for(tp=2, device="cuda")


def test_device_and_gpus(plan_for: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_for().device == "cpu" and plan_for().num_gpus is None
    monkeypatch.setattr(resolving, "visible_gpus", lambda environ: 2)
    plan = plan_for("qwen3-0.6b", tp=2)
    assert (plan.device, plan.num_gpus) == ("cuda", 2)
    assert plan.policy.attention_backend == "fa3"
    assert plan_for(device="cpu").device == "cpu"
    with pytest.raises(LayoutError, match="needs 4 GPUs"):
        plan_for(tp=4)
    # The cluster's GPUs are not this machine's.
    assert (
        plan_for("qwen3-0.6b", tp=4, environ={"RAY_ADDRESS": "ray://head:10001"}).num_gpus is None
    )
    with pytest.raises(LayoutError, match="needs 4 GPUs .* 3 available"):
        plan_for(tp=4, environ={"RAY_ADDRESS": "auto"}, overrides=("cluster.num_gpus=3",))
    with pytest.raises(LayoutError, match="the sum of"):
        plan_for(tp=2, overrides=("cluster.colocate=false",))


def test_the_attention_of_both_sides(plan_for: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert policy._FLASH3_HEAD_DIM == FLASH3_HEAD_DIM, "the launcher loads no op to plan"
    assert set(policy.ATTENTION_BACKENDS) == set(PATHS)

    def found(model: str, capability: str | None, asked: str = "auto", **more: Any) -> Any:
        monkeypatch.setattr(resolving, "host_facts", lambda: {"capability": capability})
        overrides = ("cluster.num_gpus=1", f"attention={asked}")
        return plan_for(model, device="cuda", overrides=overrides, **more)

    for capability, head_dim in itertools.product(("8.0", "9.0", "10.0"), (64, 128)):
        plan = found("qwen3-tiny" if head_dim == 64 else "qwen3-0.6b", capability)
        major, minor = map(int, capability.split("."))
        assert plan.model.head_dim == head_dim
        assert plan.policy.attention_backend == gpu_path((major, minor), head_dim)
    # A cluster's GPUs are not this host's; a wrong guess is refused where they are seen.
    cluster = {"environ": {"RAY_ADDRESS": "auto"}}
    assert found("qwen3-0.6b", "8.0", **cluster).policy.attention_backend == "fa3"
    assert found("qwen3-0.6b", None).policy.attention_backend == "fa3"
    forced = found("qwen3-0.6b", "9.0", "triton")
    assert forced.policy.attention_backend == "triton"
    assert forced.rollout.engine_kwargs["attention_backend"] == "triton"
    assert forced.rollout.expected_readback["attention_backend"] == "triton"
    assert rank_config(forced, 0, "127.0.0.1", 1, 0)["attention"] == "triton"
    with pytest.raises(ValueError, match="attention=fa3 with qwen3-tiny, head_dim=64: .*=triton"):
        found("qwen3-tiny", "9.0", "fa3")
    with pytest.raises(ValueError, match=r"attention=fa3 on a GPU of capability 8\.6: .*=triton"):
        found("qwen3-0.6b", "8.6", "fa3")
    with pytest.raises(ValueError, match="attention='fa2': choose from auto, fa3, triton"):
        found("qwen3-0.6b", "9.0", "fa2")
    with pytest.raises(ValueError, match="attention=triton with --device cpu"):
        plan_for(device="cpu", overrides=("attention=triton",))
    assert plan_for(device="cpu").policy.attention_backend == "reference"


def test_visible_gpus_are_cut_to_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_launcher.devices._installed_gpus", lambda: 4)
    expected = {"": 0, "-1": 0, "0": 1, "0,2": 2, "0,-1,1": 1, "0,1,2,3,4,5": 4, "GPU-a": 1}
    assert {v: visible_gpus({"CUDA_VISIBLE_DEVICES": v}) for v in expected} == expected
    assert visible_gpus({}) == 4
    with pytest.raises(ValueError, match="choose from auto, cpu, cuda"):
        resolve_device("gpu", 1)


def test_model_path(plan_for: Any, tiny_folder: Path, tmp_path: Path) -> None:
    plan = plan_for(model_path=tiny_folder)
    assert plan.paths.model_path == str(tiny_folder) and not plan.paths.seeded
    with pytest.raises(ValueError, match="is not qwen3-0.6b; .*hidden_size: 256 in the folder"):
        plan_for("qwen3-0.6b", model_path=tiny_folder)
    with pytest.raises(ValueError, match="is this a model folder"):
        plan_for(model_path=tmp_path / "nowhere")
    broken = tmp_path / "broken"
    shutil.copytree(tiny_folder, broken)
    (broken / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match="model.safetensors"):
        plan_for(model_path=broken)


def test_prompts_meet_the_model(plan_for: Any, tiny_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt_ids": [1, 2]}\n{"prompt_ids": [500]}\n')
    with pytest.raises(ValueError, match="p.jsonl, line 2: token id 500 is outside the voc.* 500"):
        plan_for(prompts=str(prompts))
    prompts.write_text(json.dumps({"prompt_ids": [7] * 4090}) + "\n")
    with pytest.raises(ValueError, match="line 1: 4090 prompt tokens, room for 4080"):
        plan_for(prompts=str(prompts))
    bare = tmp_path / "bare"
    shutil.copytree(tiny_folder, bare)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="builtin:lowercase, prompt 0: a text prompt, but .*bare"):
        plan_for(model_path=bare)
    prompts.write_text('{"prompt_ids": [1, 2]}\n')
    assert plan_for(model_path=bare, prompts=str(prompts)).paths.prompts == str(prompts)
    with pytest.raises(ValueError, match="cannot read the prompts"):
        plan_for(prompts=str(tmp_path / "none.jsonl"))


def test_default_out_is_new_each_time(
    plan_for: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda pattern: "20300102-030405")
    first = Path(plan_for(out=None).paths.out)
    assert first == tmp_path / "runs" / "qwen3-tiny-20300102-030405"
    first.mkdir(parents=True)
    assert Path(plan_for(out=None).paths.out).name == "qwen3-tiny-20300102-030405-2"


def test_settings_surface_is_frozen() -> None:
    """A new setting is a decision: add it here too."""
    assert [key for key in setting_keys() if key.startswith(("model", "layout", "contract"))] == [
        "model.name",
        "model.weights_seed",
        "layout.rollout_tp",
        "layout.train_tp",
        "layout.pp",
        "layout.cp",
        "contract.name",
        "contract.segments",
    ]
    assert len(setting_keys()) == len(set(setting_keys()))
