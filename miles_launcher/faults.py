"""`--inject-fault SIDE:LAYER:OP`: the deliberate one-ulp error that the gate has to notice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LAYER_OPS = (
    "input_layernorm",
    "qkv_proj",
    "q_norm",
    "k_norm",
    "rope",
    "attention",
    "o_proj",
    "post_attention_layernorm",
    "gate_up_proj",
    "silu_mul",
    "down_proj",
)
FINAL = "final"
FINAL_OPS = ("embedding", "final_norm", "lm_head", "logprob")
SIDES = ("rollout", "trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """One ulp added to the output of one op on one side: the inverse that must turn the gate red.

    `layer` is None for the ops that belong to no layer (`FINAL_OPS`).
    """

    side: Literal["rollout", "trainer"]
    layer: int | None
    op: str

    @property
    def place(self) -> str:
        """`LAYER:OP`, the form in which each side's patch reads it."""
        return f"{FINAL if self.layer is None else self.layer}:{self.op}"


def parse_fault(text: str, num_layers: int) -> FaultPlan:
    """Read `SIDE:LAYER:OP`, LAYER from 0 to `num_layers` - 1 or `final`; `ValueError` otherwise."""
    parts = text.split(":")
    if len(parts) != 3:
        raise ValueError(
            f"--inject-fault {text!r}: write SIDE:LAYER:OP, such as trainer:2:down_proj"
        )
    side, layer, op = parts
    if side not in SIDES:
        raise ValueError(f"--inject-fault {text!r}: side {side!r} is not one of {', '.join(SIDES)}")
    ops: tuple[str, ...]
    number: int | None
    if layer == FINAL:
        ops, number = FINAL_OPS, None
    elif layer.isdecimal() and int(layer) < num_layers:
        ops, number = LAYER_OPS, int(layer)
    else:
        raise ValueError(
            f"--inject-fault {text!r}: layer {layer!r} is not 0 to {num_layers - 1} or {FINAL!r}"
        )
    if op not in ops:
        where = f"layer {layer}" if number is not None else repr(FINAL)
        raise ValueError(f"--inject-fault {text!r}: ops of {where} are {', '.join(ops)}")
    return FaultPlan(side="rollout" if side == "rollout" else "trainer", layer=number, op=op)
