"""Golden rendering of every checked-in model, and names checked against the installed engines.

`python tests/miles_launcher/test_launcher_render.py` (from the repository root) writes the golden
files anew; read the difference before committing it.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from miles_launcher import resolve as resolving
from miles_launcher.conf import CONF_DIR
from miles_launcher.plan import LaunchPlan
from miles_launcher.policy import check_family
from miles_launcher.profiles import PROFILES, get_profile
from miles_launcher.render import OWN_ENGINE_FIELDS, check_engine_arguments, core_groups
from miles_launcher.resolve import LaunchArgs, resolve

GOLDEN = Path(__file__).parent / "golden"
COVERED = [name for name, profile in PROFILES.items() if profile.family == "qwen3_dense"]
MODELS = [path.stem for path in sorted((CONF_DIR / "model").glob("*.yaml"))]


def rendered(plan: LaunchPlan) -> dict[str, Any]:
    """The part of a plan that starts processes."""
    data = json.loads(plan.to_json())
    return {key: data[key] for key in ("policy", "rollout", "trainer")}


def golden_plans(model: str) -> dict[str, LaunchPlan]:
    """Both devices; on the GPU with different degrees a side."""
    common = {"model": model, "out": Path("/runs/golden")}
    environ = {"MILES_HOME": "/models"}
    plans = {"cpu": resolve(LaunchArgs(**common, device="cpu", tp=2), environ)}
    plans["cuda"] = resolve(
        LaunchArgs(**common, rollout_tp=4, train_tp=2, pp=2, device="cuda"),
        environ | {"RAY_ADDRESS": "auto"},
    )
    return plans


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolving, "cpu_ids", lambda: (0, 1, 2, 3))


@pytest.mark.parametrize("model", MODELS)
def test_golden(model: str) -> None:
    if model not in COVERED:
        with pytest.raises(ValueError, match="does not cover family qwen3_moe"):
            check_family("qwen3_dense_true_on_policy_v2", get_profile(model))
        return
    expected = json.loads((GOLDEN / f"{model}.json").read_text())
    assert {key: rendered(plan) for key, plan in golden_plans(model).items()} == expected


def _engine_fields() -> set[str]:
    """Fields of SGLang's ServerArgs, read from its source: importing it takes seconds."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "srt" / "server_args.py"
    return _annotated_fields(path, "ServerArgs")


def _annotated_fields(path: Path, name: str) -> set[str]:
    tree = ast.parse(path.read_text())
    (node,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    return {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def test_engine_arguments_exist_in_the_installed_sglang(plan_for: Any) -> None:
    fields = _engine_fields()
    for plan in (
        plan_for(tp=2, inject_fault="rollout:0:o_proj"),
        plan_for("qwen3-0.6b", tp=2, device="cuda", overrides=("cluster.num_gpus=2",)),
        plan_for(contract="off"),
    ):
        assert set(plan.rollout.engine_kwargs) - OWN_ENGINE_FIELDS <= fields
        assert plan.rollout.expected_readback.items() <= plan.rollout.engine_kwargs.items()


def test_trainer_arguments_exist_in_the_installed_megatron(plan_for: Any) -> None:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    core = Path(spec.origin).parent
    fields = _annotated_fields(core / "model_parallel_config.py", "ModelParallelConfig")
    fields |= _annotated_fields(core / "transformer/transformer_config.py", "TransformerConfig")
    plan = plan_for(pp=2, cp=2, overrides=("train.recompute=full",))
    assert plan.trainer.config_kwargs.keys() <= fields
    assert plan.trainer.config_kwargs["recompute_granularity"] == "full"
    assert plan.trainer.config_kwargs["cp_comm_type"] == "a2a"
    for path, function, arguments in (
        ("parallel_state.py", "initialize_model_parallel", plan.trainer.parallel_kwargs),
        ("models/gpt/gpt_model.py", "__init__", plan.trainer.model_kwargs),
    ):
        tree = ast.parse((core / path).read_text())
        definition = next(
            n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function
        )
        assert arguments.keys() <= {a.arg for a in definition.args.args}


def test_unknown_engine_argument_names_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for SGLang: the real one takes seconds to import."""
    import dataclasses
    import sys
    import types

    names = ["tp_size", "attention_backend"]
    server_args = types.ModuleType("sglang.srt.server_args")
    server_args.ServerArgs = dataclasses.make_dataclass("ServerArgs", names)  # type: ignore[attr-defined]
    sglang = types.ModuleType("sglang")
    sglang.__version__ = "9.9.9"  # type: ignore[attr-defined]
    for name, module in (
        ("sglang", sglang),
        ("sglang.srt", types.ModuleType("sglang.srt")),
        ("sglang.srt.server_args", server_args),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    check_engine_arguments({"tp_size": 1, "true_on_policy_contract": "x"})
    message = "SGLang 9.9.9 has no field attention_backends .did it become attention_backend"
    with pytest.raises(ValueError, match=message):
        check_engine_arguments({"tp_size": 1, "attention_backends": "fa3"})


def test_contract_off_is_a_stock_rollout(plan_for: Any) -> None:
    on, off = plan_for(tp=2), plan_for(tp=2, contract="off")
    switched = {"true_on_policy_contract", "enable_deterministic_inference"}
    assert switched <= on.rollout.engine_kwargs.keys()
    assert not switched & off.rollout.engine_kwargs.keys()
    assert not any("rl_on_policy_target" in p.rollout.engine_kwargs for p in (on, off))
    assert off.policy.contract == on.policy.contract and not off.policy.patched
    target = ("rollout.stock_on_policy_target=fsdp",)
    control = plan_for(contract="off", overrides=target).rollout
    assert control.engine_kwargs["rl_on_policy_target"] == "fsdp"
    assert control.expected_readback["rl_on_policy_target"] == "fsdp"
    assert on.rollout.engine_kwargs["true_on_policy_contract"].endswith("_v2:segments=2")


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        ((0, 1), 1, "0-1"),
        ((0, 1), 2, "0|1"),
        ((0, 1), 4, "0|1|0|1"),
        ((0, 1, 2, 3, 4, 5, 6, 7), 2, "0-3|4-7"),
        ((0, 1, 2, 3, 4), 2, "0-1|2-3"),
        ((3, 9, 10), 1, "3,9,10"),
        ((5,), 2, "5|5"),
    ],
)
def test_core_groups(cores: tuple[int, ...], ranks: int, expected: str) -> None:
    assert core_groups(cores, ranks) == expected


def test_each_role_has_its_own_nccl_algorithm(plan_for: Any) -> None:
    plan = plan_for("qwen3-0.6b", tp=2, device="cuda", overrides=("cluster.num_gpus=2",))
    assert plan.rollout.env["NCCL_ALGO"] == "allreduce:tree"
    assert plan.trainer.env["NCCL_ALGO"] == "Ring"
    assert plan.rollout.env["NCCL_NVLS_ENABLE"] == plan.trainer.env["NCCL_NVLS_ENABLE"] == "0"


def test_owned_variables_conflict_with_both_values(plan_for: Any) -> None:
    gpu = {"model": "qwen3-0.6b", "device": "cuda", "overrides": ("cluster.num_gpus=1",)}
    with pytest.raises(ValueError, match="NCCL_NVLS_ENABLE='1' in your environment, '0' for"):
        plan_for(**gpu, environ={"NCCL_NVLS_ENABLE": "1"})
    with pytest.raises(ValueError, match="NCCL_ALGO='Ring' .*'allreduce:tree' for the rollout"):
        plan_for(**gpu, environ={"NCCL_ALGO": "Ring"})
    with pytest.raises(ValueError, match="CUBLAS_WORKSPACE_CONFIG=':16:8' .* for the trainer"):
        plan_for(**gpu, environ={"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    plan_for(**gpu, environ={"NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "INFO"})


def test_hidden_gpus_and_thread_counts_are_no_conflict(plan_for: Any) -> None:
    plan = plan_for(device="cpu", environ={"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "7"})
    assert plan.rollout.env["CUDA_VISIBLE_DEVICES"] == ""
    assert plan.trainer.env["OMP_NUM_THREADS"] == "7"


def write_golden() -> None:
    GOLDEN.mkdir(exist_ok=True)
    resolving.cpu_ids = lambda: (0, 1, 2, 3)
    for model in COVERED:
        data = {key: rendered(plan) for key, plan in golden_plans(model).items()}
        (GOLDEN / f"{model}.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    write_golden()
