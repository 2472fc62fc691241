"""The gate: a run goes on only where equality was shown. Everything else closes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .compare import Comparison

_MAX_SHOWN = 4
# The hooks behind which the contract's own attention runs, of the engine's backend in use.
_ATTENTION_HOOKS = (
    "attention_extend",
    "attention_decode",
    "attention_triton_extend",
    "attention_triton_decode",
)


class GateClosed(Exception):
    """Equality was not shown; the message says what was found instead. Exit code 3."""


def check_tokens(comparison: Comparison) -> None:
    """Close on any differing token, and on a batch in which nothing was compared."""
    if comparison.compared_tokens == 0:
        raise GateClosed("zero tokens were compared: nothing was shown")
    if comparison.mismatched_tokens:
        shown = "; ".join(
            f"sequence {m.sequence} token {m.position} (id {m.token_id}): rollout {m.rollout!r} "
            f"[{m.rollout_bits}], trainer {m.trainer!r} [{m.trainer_bits}]"
            + (f", {m.ulp} ulp" if m.ulp is not None else "")
            for m in comparison.first[:_MAX_SHOWN]
        )
        raise GateClosed(
            f"{comparison.mismatched_tokens} of {comparison.compared_tokens} tokens differ, at "
            f"most by {comparison.max_abs_diff:.3g}: {shown}"
        )


def check_readbacks(
    rollout: Sequence[Mapping[str, Any]], trainer: Sequence[Mapping[str, Any]], rollout_tp: int
) -> dict[str, dict[str, Any]]:
    """Close unless every rank of both sides reports, and all report one fingerprint.

    Returns the fingerprint of each side, `{"rollout": ..., "trainer": ...}`.
    """
    if len(rollout) != rollout_tp:
        raise GateClosed(
            f"{len(rollout)} of {rollout_tp} rollout ranks report a contract: the plugin is not "
            "live in every scheduler, so the engine would serve stock kernels"
        )
    if not trainer:
        raise GateClosed("no trainer rank reports a contract")
    reference = rollout[0]["fingerprint"]
    for side, reports in (("rollout", rollout), ("trainer", trainer)):
        for rank, report in enumerate(reports):
            fingerprint = report["fingerprint"]
            different = [
                f"{key}: rollout rank 0 has {reference.get(key)!r}, {side} rank {rank} has "
                f"{fingerprint.get(key)!r}"
                for key in sorted(reference.keys() | fingerprint.keys())
                if reference.get(key) != fingerprint.get(key) and key != "digest"
            ]
            if different:
                raise GateClosed("unequal fingerprints: " + "; ".join(different))
    return {"rollout": dict(reference), "trainer": dict(trainer[0]["fingerprint"])}


def check_arguments(expected: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Close where the engine runs with another value than the plan gave it."""
    missing = object()
    different = [
        f"{name}: plan {value!r}, engine {live.get(name, 'absent')!r}"
        for name, value in expected.items()
        if live.get(name, missing) != value
    ]
    if different:
        raise GateClosed("the engine changed its arguments: " + "; ".join(different))


def check_hook_calls(
    readbacks: Sequence[Mapping[str, Any]], *, qk_layernorm: bool, attention_ours: bool
) -> None:
    """Close unless the hooks ran as often as the layers did, in every rollout rank.

    One forward pass embeds once; a layer has two column-parallel and two row-parallel linears, two
    norms, one rotation and one attention. With q/k norm it has two norms more, or one fused op in
    the place of these and the rotation. Other counts mean that something
    went around a hook, or twice through it. attention_ours: the kernel is the contract's own text,
    not the engine's FA3.
    """
    for rank, report in enumerate(readbacks):
        calls, layers = report["calls"], report["num_layers"]
        forwards = calls.get("embedding", 0)
        if calls.get("lm_head", 0) == 0:
            raise GateClosed(f"rollout rank {rank}: no logits went through the hooks")
        if forwards == 0:
            raise GateClosed(f"rollout rank {rank}: no forward pass went through the hooks")
        # Counted as what they stand for: the rotation, and the two norms.
        fused = calls.get("qk_norm_rope", 0) if qk_layernorm else 0
        per_forward = {
            "linear": 2 * layers,
            "row_linear": 2 * layers,
            "attention": layers,
            "silu_mul": layers,
            "rope": layers,
            "rms_norm": (4 if qk_layernorm else 2) * layers + 1,
        }
        counted = {name: calls.get(name, 0) for name in per_forward}
        counted["rope"] += fused
        counted["rms_norm"] += 2 * fused
        if attention_ours:
            per_forward["attention kernel"] = layers
            counted["attention kernel"] = sum(calls.get(name, 0) for name in _ATTENTION_HOOKS)
        different = [
            f"{name} {counted[name]} times, expected {forwards * times}"
            for name, times in per_forward.items()
            if counted[name] != forwards * times
        ]
        if calls.get("sampler", 0) == 0:
            different.append("sampler never")
        if different:
            raise GateClosed(
                f"rollout rank {rank}: in {forwards} forward passes the hooks ran "
                + ", ".join(different)
            )


def check_weights(rollout: str | None, trainer: str | None) -> str:
    """Close unless both sides hold the same weights; returns their digest."""
    if rollout is None or trainer is None or rollout != trainer:
        raise GateClosed(f"weights differ: rollout digest {rollout}, trainer digest {trainer}")
    return rollout
