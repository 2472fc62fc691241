"""Contract -> what this engine must run: looked up by name, no branches per model."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .ops.digest import source_digest, table_digest
from .ops.fault import Fault, parse_fault
from .ops.rope.op import rope_table
from .schema import (
    Fingerprint,
    RowReduction,
    TrueOnPolicyContract,
    VocabularySegments,
    get_contract,
    row_reduction,
    split_bound_name,
    vocabulary_segments,
)

_PACKAGE = Path(__file__).resolve().parent

# The engine's attention backend -> the path of ours. Which one a device may take is checked once
# the model is there (`hooks/model.py`).
ATTENTION_PATHS = {"fa3": "fa3", "triton": "triton", "torch_native": "reference"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangRuntimePolicy:
    """A contract bound to one engine: its tensor-parallel size, segments, injected fault, and the
    path of its attention (`fa3`, `triton` or `reference`)."""

    contract: TrueOnPolicyContract
    segments: int
    tensor_parallel_size: int
    attention: str
    fault: Fault | None = None

    def row_reduction(self, k_global: int) -> RowReduction:
        """How a row-parallel linear over `k_global` is summed; `ValueError` where it cannot be."""
        return row_reduction(
            self.contract.name,
            k_global,
            rollout_tp=self.tensor_parallel_size,
            segments=self.segments,
        )

    def vocabulary(self, vocab_size: int) -> VocabularySegments:
        """The segments of the log-softmax over the real vocabulary."""
        return vocabulary_segments(self.contract.name, vocab_size)

    def fingerprint(
        self, *, head_dim: int, max_position: int, rope_theta: float, device: str
    ) -> Fingerprint:
        """What the trainer must match before the first token."""
        return Fingerprint(
            contract=self.contract.name,
            contract_digest=self.contract.digest(),
            segments=self.segments,
            rollout_tensor_parallel_size=self.tensor_parallel_size,
            schema_digest=source_digest(_PACKAGE / "schema"),
            ops_digest=source_digest(_PACKAGE / "ops"),
            rope_digest=table_digest(rope_table(head_dim, max_position, rope_theta)),
            attention=self.attention,
            device=device,
            versions=tuple(
                (name, importlib.metadata.version(name)) for name in ("torch", "triton")
            ),
        )


def policy_for(server_args: Any) -> SGLangRuntimePolicy | None:
    """The policy of an engine, from its resolved `ServerArgs`; None where no contract is asked for.

    Raises `ValueError` listing every setting under which the contract cannot hold.
    """
    text = getattr(server_args, "true_on_policy_contract", None)
    fault_text = getattr(server_args, "true_on_policy_fault", None)
    if text is None:
        if fault_text is not None:
            raise ValueError("--true-on-policy-fault needs --true-on-policy-contract")
        return None
    name, segments = split_bound_name(text)
    contract = get_contract(name)
    tensor_parallel_size = server_args.tp_size
    rule = contract.row_linear
    if rule.order != "segments":
        segments = rule.max_segments
    elif segments is None:
        segments = max(1, tensor_parallel_size)
    sizes = (("tp_size", tensor_parallel_size, rule.max_tensor_parallel_size),) + (
        (("segments", segments, rule.max_segments),) if rule.order == "segments" else ()
    )
    backend = str(getattr(server_args, "attention_backend", None))
    violations = [
        f"{what}={value}: a power of two from 1 to {largest} is needed"
        for what, value, largest in sizes
        if value < 1 or value & (value - 1) or value > largest
    ]
    if rule.order == "segments" and segments < tensor_parallel_size:
        violations.append(f"segments={segments} at tp_size={tensor_parallel_size}: a rank has none")
    violations += [
        f"{setting}={value!r}: {reason}"
        for setting, value, allowed, reason in _requirements(server_args)
        if value not in allowed
    ]
    if violations:
        raise ValueError(f"{name} cannot hold with: " + "; ".join(violations))
    return SGLangRuntimePolicy(
        contract=contract,
        segments=segments,
        tensor_parallel_size=tensor_parallel_size,
        attention=ATTENTION_PATHS.get(backend, backend),
        fault=None if fault_text is None else parse_fault(fault_text),
    )


def _requirements(server_args: Any) -> list[tuple[str, object, tuple[object, ...], str]]:
    """(setting, value, allowed values, reason) for everything that could go around a hook."""

    def get(name: str) -> object:
        return getattr(server_args, name, None)

    off: tuple[object, ...] = (None, False)
    return [
        ("dtype", get("dtype"), ("bfloat16",), "weights and activations are bf16"),
        ("torchao_config", get("torchao_config"), (None, ""), "it quantises after loading"),
        ("attn_cp_size", get("attn_cp_size"), (None, 1), "the engine would split sequences"),
        ("dcp_size", get("dcp_size"), (None, 1), "the engine would split sequences"),
        (
            "enable_two_batch_overlap",
            get("enable_two_batch_overlap"),
            off,
            "it takes another path through the layers",
        ),
        ("quantization", get("quantization"), (None,), "quantised kernels round elsewhere"),
        (
            "kv_cache_dtype",
            get("kv_cache_dtype"),
            ("auto", "bf16", "bfloat16"),
            "keys and values are bf16",
        ),
        ("pp_size", get("pp_size"), (1,), "rollout pipeline stages are not supported"),
        ("dp_size", get("dp_size"), (1,), "start several engines instead"),
        ("enable_dp_attention", get("enable_dp_attention"), off, "attention ranks would differ"),
        (
            "speculative_algorithm",
            get("speculative_algorithm"),
            (None,),
            "verified tokens take another path than decoded ones",
        ),
        ("enable_torch_compile", get("enable_torch_compile"), off, "it may fuse multiply and add"),
        ("enable_symm_mem", get("enable_symm_mem"), off, "its all-reduce goes around the tree"),
        (
            "enable_flashinfer_allreduce_fusion",
            get("enable_flashinfer_allreduce_fusion"),
            off,
            "the fused all-reduce and norm goes around the tree",
        ),
        ("enable_mscclpp", get("enable_mscclpp"), off, "its all-reduce goes around the tree"),
        ("enable_lora", get("enable_lora"), off, "adapters add sums that the contract lacks"),
        (
            "enable_deterministic_inference",
            get("enable_deterministic_inference"),
            (True,),
            "it pins attention to one split and sampling to per-request seeds",
        ),
        ("enable_fp32_lm_head", get("enable_fp32_lm_head"), off, "the head multiplies bf16"),
    ]
