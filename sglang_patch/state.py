"""What is live in this engine process: the policy, the place in the model, the call counts.

A scheduler process serves one model with one contract, so this is process-wide by nature. Without
an active policy every hook hands over to the original: the engine is stock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from .contracts import SGLangRuntimePolicy
from .ops.fault import FINAL_OPS, Fault, flip_one_ulp
from .ops.taps import OUTPUT, TapLog
from .ops.tree_all_reduce.op import RankGroup


@dataclass(slots=True)
class RuntimeState:
    """The active policy with this rank's group; `layer` is where the forward pass is; `taps` is
    None unless rows are being recorded; `fault` is the policy's until another is set."""

    policy: SGLangRuntimePolicy
    ranks: RankGroup = field(default_factory=RankGroup)
    layer: int | None = None
    calls: Counter[str] = field(default_factory=Counter)
    in_embedding: bool = False
    taps: TapLog | None = None
    fault: Fault | None = None

    def __post_init__(self) -> None:
        self.fault = self.policy.fault


_state: RuntimeState | None = None


def active() -> RuntimeState | None:
    """The live state, or None where the engine runs without a contract."""
    return _state


def activate(policy: SGLangRuntimePolicy | None) -> None:
    """Make `policy` the one of this process (None: stock). A second, other policy is an error."""
    global _state
    if _state is not None and policy is not None and _state.policy != policy:
        raise ValueError(
            f"this process already serves {_state.policy.contract.name}; start another engine for "
            f"{policy.contract.name}"
        )
    if policy is None or _state is None:
        _state = None if policy is None else RuntimeState(policy)


def require() -> RuntimeState:
    """The live state where the caller knows that a policy is active."""
    assert _state is not None
    return _state


def flip(op: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy with one ulp flipped where the injected fault names this place."""
    state = require()
    if state.fault is None:
        return tensor
    return flip_one_ulp(state.fault, tensor, layer=state.layer, op=op, rank=state.ranks.rank)


def record(op: str, tensor: torch.Tensor, name: str = OUTPUT, **how: Any) -> None:
    """Digest the rows of `tensor` [rows, ...] where taps are on: the result of `op`, or what enters
    it as `name`; `how` as in `TapLog.record`."""
    state = require()
    if state.taps is not None:
        state.taps.record(None if op in FINAL_OPS else state.layer, op, tensor, name, **how)


def entering(op: str, tensor: torch.Tensor, layer: int | None = None, name: str = "input") -> None:
    """Digest what enters `op` where taps are on; `layer` moves the place."""
    if layer is not None:
        require().layer = layer
    record(op, tensor, name)


def tap(op: str, tensor: torch.Tensor, layer: int | None = None, **how: Any) -> torch.Tensor:
    """The named place in the model where a fault can be injected and rows are recorded; `layer`
    moves the place, `how` is as in `TapLog.record`."""
    if layer is not None:
        require().layer = layer
    tensor = flip(op, tensor)
    record(op, tensor, **how)
    return tensor
