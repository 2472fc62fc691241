"""`policy_for`: from the engine's arguments to what its hooks run. No SGLang is imported."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_patch.contracts import SGLangRuntimePolicy, policy_for
from sglang_patch.ops.fault import Fault
from sglang_patch.schema import CONTRACTS, Fingerprint, vocabulary_segments

V1 = "qwen3_dense_true_on_policy_v1"
V2 = "qwen3_dense_true_on_policy_v2"

PERMITTED: dict[str, Any] = {
    "true_on_policy_contract": V2,
    "true_on_policy_fault": None,
    "dtype": "bfloat16",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "tp_size": 2,
    "attention_backend": "torch_native",
    "pp_size": 1,
    "dp_size": 1,
    "enable_dp_attention": False,
    "speculative_algorithm": None,
    "enable_torch_compile": False,
    "enable_symm_mem": False,
    "enable_flashinfer_allreduce_fusion": False,
    "enable_mscclpp": False,
    "enable_lora": None,
    "enable_deterministic_inference": True,
    "enable_fp32_lm_head": False,
}

# Each of these would go around a hook, or round where the contract does not.
FORBIDDEN: dict[str, Any] = {
    "dtype": "float16",
    "quantization": "fp8",
    "kv_cache_dtype": "fp8_e5m2",
    "pp_size": 2,
    "dp_size": 2,
    "enable_dp_attention": True,
    "speculative_algorithm": "EAGLE",
    "enable_torch_compile": True,
    "enable_symm_mem": True,
    "enable_flashinfer_allreduce_fusion": True,
    "enable_mscclpp": True,
    "enable_lora": True,
    "enable_deterministic_inference": False,
    "enable_fp32_lm_head": True,
}


def policy(**changes: Any) -> SGLangRuntimePolicy:
    found = policy_for(SimpleNamespace(**{**PERMITTED, **changes}))
    assert found is not None
    return found


def test_no_contract_is_a_stock_engine() -> None:
    assert policy_for(SimpleNamespace()) is None
    assert policy_for(SimpleNamespace(**{**PERMITTED, "true_on_policy_contract": None})) is None
    # A stock engine may be anything: nothing is checked.
    assert policy_for(SimpleNamespace(dtype="float16", quantization="fp8")) is None


def test_it_is_decided_without_sglang() -> None:
    """Where the engine is not installed the launcher can still ask what would be refused."""
    program = (
        "import sys; sys.modules['sglang'] = None\n"
        "from types import SimpleNamespace\n"
        "from sglang_patch.contracts import policy_for\n"
        f"print(policy_for(SimpleNamespace(**{PERMITTED!r})).contract.name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{V2}\n"), done.stderr


@pytest.mark.parametrize("name", [V1, V2])
def test_the_contract_is_looked_up_by_name(name: str) -> None:
    assert policy(true_on_policy_contract=name).contract.digest() == CONTRACTS[name].digest()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_segments_default_to_the_engines_own_degree(tp: int) -> None:
    assert policy(tp_size=tp).segments == tp
    assert policy(tp_size=tp, true_on_policy_contract=f"{V2}:segments=8").segments == 8


def test_unknown_contract_lists_the_choices() -> None:
    with pytest.raises(ValueError, match=f"unknown contract 'v3'; choose one of: {V1}, {V2}"):
        policy(true_on_policy_contract="v3")


@pytest.mark.parametrize("setting", FORBIDDEN)
def test_one_forbidden_setting_is_named_with_its_value_and_reason(setting: str) -> None:
    with pytest.raises(ValueError, match=f"{V2} cannot hold with: ") as caught:
        policy(**{setting: FORBIDDEN[setting]})
    (violation,) = str(caught.value).partition("cannot hold with: ")[2].split("; ")
    assert violation.startswith(f"{setting}={FORBIDDEN[setting]!r}: ")
    assert len(violation.partition(": ")[2]) > 10


def test_all_violations_are_listed_at_once() -> None:
    with pytest.raises(ValueError, match="cannot hold with") as caught:
        policy(**FORBIDDEN)
    violations = str(caught.value).partition("cannot hold with: ")[2].split("; ")
    assert [violation.partition("=")[0] for violation in violations] == list(FORBIDDEN)


def test_a_setting_that_the_engine_does_not_have_is_not_permission() -> None:
    """Renamed upstream: what must be on is then missing, and refused."""
    values = {k: v for k, v in PERMITTED.items() if k != "enable_deterministic_inference"}
    with pytest.raises(ValueError, match="enable_deterministic_inference=None"):
        policy_for(SimpleNamespace(**values))


def test_fault_needs_a_contract_and_a_known_place() -> None:
    assert policy(true_on_policy_fault="2:down_proj:1").fault == Fault(2, "down_proj", rank=1)
    assert policy().fault is None
    with pytest.raises(ValueError, match="--true-on-policy-fault needs --true-on-policy-contract"):
        policy_for(SimpleNamespace(true_on_policy_fault="2:down_proj"))
    with pytest.raises(ValueError, match="cannot read fault '2:up_proj'"):
        policy(true_on_policy_fault="2:up_proj")


def test_policy_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy().segments = 4  # type: ignore[misc]


def test_row_reduction_is_bound_to_this_engine() -> None:
    v2 = policy(true_on_policy_contract=f"{V2}:segments=4")
    assert v2.row_reduction(1536).association == ((0, 1), (2, 3))
    v1 = policy(true_on_policy_contract=V1, tp_size=4)
    assert v1.row_reduction(1536).path == "tiles"
    assert v1.row_reduction(4864).path == "rollout-partition"
    assert v1.row_reduction(4864).num_leaves == v1.row_reduction(4864).bias_ranks == 4


def test_row_reduction_refuses_what_the_segments_do_not_divide() -> None:
    with pytest.raises(ValueError, match="K=1540 is not divisible by segments=8"):
        policy(true_on_policy_contract=f"{V2}:segments=8").row_reduction(1540)


@pytest.mark.parametrize(
    ("tp_size", "bound", "message"),
    [
        (3, f"{V2}:segments=8", "tp_size=3: a power of two"),
        (1, f"{V2}:segments=3", "segments=3: a power of two"),
        (2, f"{V2}:segments=1", "segments=1 at tp_size=2: a rank has none"),
        (3, V1, "tp_size=3: a power of two"),
    ],
)
def test_impossible_degrees_are_refused_before_a_model_is_loaded(
    tp_size: int, bound: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        policy(tp_size=tp_size, true_on_policy_contract=bound)


def test_segments_do_not_enter_a_contract_that_has_none() -> None:
    assert policy(true_on_policy_contract=V1) == policy(true_on_policy_contract=f"{V1}:segments=2")


@pytest.mark.parametrize("name", [V1, V2])
def test_vocabulary_is_the_contracts(name: str) -> None:
    bound = policy(true_on_policy_contract=name)
    assert dataclasses.asdict(bound.vocabulary(259)) == dataclasses.asdict(
        vocabulary_segments(name, 259)
    )


def fingerprint(bound: SGLangRuntimePolicy, **changes: Any) -> Fingerprint:
    values = {"head_dim": 16, "max_position": 64, "rope_theta": 1e6, "device": "cpu"}
    return bound.fingerprint(**{**values, **changes})


def test_fingerprint_names_everything_that_sets_bits() -> None:
    mine = fingerprint(policy())
    assert (mine.contract, mine.contract_digest) == (V2, CONTRACTS[V2].digest())
    assert (mine.segments, mine.rollout_tensor_parallel_size, mine.device) == (2, 2, "cpu")
    assert [name for name, _ in mine.versions] == ["torch", "triton"]
    assert all(
        len(d) == 64 for d in (mine.schema_digest, mine.ops_digest, mine.rope_digest, mine.digest())
    )


def test_the_attention_in_use_is_in_the_fingerprint() -> None:
    mine = fingerprint(policy())
    for backend, path in (("fa3", "fa3"), ("triton", "triton"), ("torch_native", "reference")):
        found = fingerprint(policy(attention_backend=backend))
        assert found.attention == path
        assert (found.differences(mine) == []) == (path == "reference")


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"head_dim": 32}, ["rope_digest"]),
        ({"max_position": 65}, ["rope_digest"]),
        ({"rope_theta": 1e4}, ["rope_digest"]),
        ({"device": "NVIDIA H200"}, ["device"]),
    ],
)
def test_fingerprint_differs_by_what_the_engine_was_given(
    changes: dict[str, Any], fields: list[str]
) -> None:
    differences = fingerprint(policy()).differences(fingerprint(policy(), **changes))
    assert [line.partition(":")[0] for line in differences] == fields


def test_fingerprint_differs_by_contract_and_layout() -> None:
    first = fingerprint(policy(true_on_policy_contract=f"{V2}:segments=4"))
    second = fingerprint(policy(true_on_policy_contract=f"{V2}:segments=8", tp_size=4))
    assert [line.partition(":")[0] for line in first.differences(second)] == [
        "segments",
        "rollout_tensor_parallel_size",
    ]


def test_the_trainers_fingerprint_is_equal_where_the_text_is() -> None:
    """Two vendored copies, two packages, one fingerprint: names of packages do not enter it."""
    from megatron_patch.ops.digest import source_digest as theirs
    from sglang_patch.contracts import _PACKAGE
    from sglang_patch.ops.digest import source_digest as ours

    trainer = _PACKAGE.parent / "megatron_patch"
    for folder in ("schema", "ops"):
        assert ours(_PACKAGE / folder) == theirs(trainer / folder)
