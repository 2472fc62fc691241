"""What to look at for a place in the model: fields of the contract, and the code of each side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from ..plan import LaunchPlan
from ..schema import get_contract
from .flow import Place

_ROLLOUT_HOOKS: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "communicator.py",
        "qkv_proj": "linear.py",
        "gate_up_proj": "linear.py",
        "o_proj": "linear.py",
        "down_proj": "linear.py",
        "rope": "rope.py",
        "rope_k": "rope.py",
        "attention": "attention.py",
        "silu_mul": "activation.py",
        "lm_head": "logits.py",
        "temperature": "sampler.py",
        "logprob": "sampler.py",
    }
)
_TRAINER_LAYERS: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "embedding.py",
        "q_norm": "attention.py",
        "k_norm": "attention.py",
        "input_layernorm": "transformer_layer.py",
        "post_attention_layernorm": "transformer_layer.py",
        "final_norm": "norm.py",
        "rope": "rope.py",
        "rope_k": "rope.py",
        "attention": "attention.py",
        "qkv_proj": "attention.py",
        "o_proj": "attention.py",
        "gate_up_proj": "mlp.py",
        "silu_mul": "mlp.py",
        "down_proj": "mlp.py",
        "lm_head": "logits.py",
        "temperature": "logits.py",
        "logprob": "logits.py",
    }
)
# op -> (the field of the contract, the folder in ops/; None where no op of ours computes)
_OPS: Mapping[str, tuple[str, str | None]] = MappingProxyType(
    {
        "embedding": ("embedding", None),
        "qkv_proj": ("row_linear", "linear"),
        "gate_up_proj": ("row_linear", "linear"),
        "o_proj": ("row_linear", "row_linear"),
        "down_proj": ("row_linear", "row_linear"),
        "rope": ("rope", "rope"),
        "rope_k": ("rope", "rope"),
        "attention": ("attention", "attention"),
        "silu_mul": ("norm", "silu_mul"),
        "lm_head": ("logprob", "linear"),
        "temperature": ("logprob", "log_softmax"),
        "logprob": ("logprob", "log_softmax"),
    }
)


def look_at(
    place: Place, plan: LaunchPlan, between: Sequence[str], versions: Mapping[str, str]
) -> dict[str, Any]:
    """`look_at` of `bisect.json`: `policy`, and for each side `kernel`, `source`, `version`."""
    rule, folder = _OPS.get(place.op, ("norm", "rms_norm"))
    policy: dict[str, Any] = {"contract": plan.contract}
    contract = get_contract(plan.policy.contract)
    if folder != "silu_mul":
        policy |= {f"{rule}.{k}": v for k, v in asdict(getattr(contract, rule)).items()}
    for row in plan.policy.row_linears:
        if row.layer == place.op:
            policy |= {"segments": plan.segments, **asdict(row)}
    return {
        "policy": policy,
        **{
            side: _side(side, place, folder, plan.device, plan.policy.attention_backend, versions)
            for side in between
        },
    }


def _side(
    side: str,
    place: Place,
    folder: str | None,
    device: str,
    attention: str,
    versions: Mapping[str, str],
) -> dict[str, str]:
    trainer = side == "trainer"
    package = "megatron_patch" if trainer else "sglang_patch"
    file = (
        f"layers/{_TRAINER_LAYERS[place.op]}"
        if trainer
        else f"hooks/{_ROLLOUT_HOOKS.get(place.op, 'norm.py')}"
    )
    if not place.is_output:
        kernel = f"what carries {place.tensor} into it"
    elif folder is None:
        kernel = "a row of the table"
    elif place.op == "attention" and attention == "fa3":
        kernel = "FA3 (sgl_kernel), one split"
    else:
        text = "reference.py (PyTorch)" if device == "cpu" else "kernel.py (Triton)"
        kernel = f"ops/{folder}/{text}"
    engine = "megatron-core" if trainer else "sglang"
    used = [engine, "torch", *(["triton"] if device == "cuda" else [])]
    return {
        "kernel": kernel,
        "source": f"{package}/{file}",
        "version": ", ".join(f"{name} {versions[name]}" for name in used if name in versions),
    }
