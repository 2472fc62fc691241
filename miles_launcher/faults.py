"""`--inject-fault SIDE:LAYER:OP[:RANK[:TOKEN]]`: the deliberate one-ulp error that the gate has to
notice and `miles bisect` has to find."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

LAYER_OPS = (
    "input_layernorm",
    "qkv_proj",
    "q_norm",
    "k_norm",
    "rope",
    "rope_k",
    "attention",
    "o_proj",
    "post_attention_layernorm",
    "gate_up_proj",
    "silu_mul",
    "down_proj",
)
FINAL = "final"
FINAL_OPS = ("embedding", "final_norm", "lm_head", "temperature", "logprob")
SIDES = ("rollout", "trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """One ulp added to the output of one op on one side: the inverse that must turn the gate red.

    `layer` is None for the ops that belong to no layer (`FINAL_OPS`). `rank`: of the side's
    tensor-parallel group alone; None: every rank. `token`: this row of every call that has so many,
    counted in the side's own batch; None: every row.
    """

    side: Literal["rollout", "trainer"]
    layer: int | None
    op: str
    rank: int | None = None
    token: int | None = None

    @property
    def place(self) -> str:
        """`LAYER:OP[:RANK[:TOKEN]]`, the form in which each side's patch reads it."""
        place = f"{FINAL if self.layer is None else self.layer}:{self.op}"
        return ":".join([place, *(str(n) for n in (self.rank, self.token) if n is not None)])


def parse_fault(text: str, num_layers: int) -> FaultPlan:
    """Read `SIDE:LAYER:OP[:RANK[:TOKEN]]`, LAYER from 0 to `num_layers` - 1 or `final`.

    Raises `ValueError` otherwise; for an unknown op it lists the close ones first.
    """
    parts = text.split(":")
    if not 3 <= len(parts) <= 5:
        raise ValueError(
            f"--inject-fault {text!r}: write SIDE:LAYER:OP[:RANK[:TOKEN]], such as "
            "trainer:2:down_proj"
        )
    side, layer, op = parts[:3]
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
        close = difflib.get_close_matches(op, ops, n=2)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(f"--inject-fault {text!r}: {hint}ops of {where} are {', '.join(ops)}")
    for what, part in zip(("rank", "token"), parts[3:], strict=False):
        if not part.isdecimal():
            raise ValueError(f"--inject-fault {text!r}: {what} {part!r} is not a number from 0")
    rank, token = (*(int(part) for part in parts[3:]), None, None)[:2]
    return FaultPlan(
        side="rollout" if side == "rollout" else "trainer",
        layer=number,
        op=op,
        rank=rank,
        token=token,
    )
