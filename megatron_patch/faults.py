"""The named places of the model: every layer hands its result through `tap`.

A tap counts the call, so that a readback can show that the intended path ran; it is where a
one-ulp fault is injected, so that a comparison can show that it would have noticed one; and where
the rows are recorded while taps are on (`taps.py`). A trainer process holds one model, so all are
process-wide by nature.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from .function import apply
from .ops.fault import FINAL_OPS, LAYER_OPS, Fault, flip_one_ulp, parse_fault
from .ops.taps import TapLog

__all__ = [
    "FINAL_OPS",
    "LAYER_OPS",
    "Fault",
    "calls",
    "entering",
    "flip",
    "observed",
    "parse_fault",
    "set_fault",
    "tap",
    "tap_value",
]

_fault: Fault | None = None
_rank = 0
_log: TapLog | None = None
calls: Counter[str] = Counter()


def set_fault(fault: Fault | None, rank: int = 0) -> None:
    """Inject `fault` from now on (None: no more). `rank` is this process's tensor-parallel rank,
    which a fault's own `rank` is compared with."""
    global _fault, _rank
    _fault, _rank = fault, rank


def active_fault() -> Fault | None:
    """The fault in force, or None."""
    return _fault


def set_log(log: TapLog | None) -> None:
    """Record the rows of every tap in `log` from now on (None: no more)."""
    global _log
    _log = log


def active_log() -> TapLog | None:
    """The record in progress, or None."""
    return _log


def observed(*ops: str) -> bool:
    """Whether anybody looks between ops, whose results must then exist, whole: taps are on, or a
    fault is to be injected (where ops are named: into one of these, outside the layers)."""
    if _log is not None or _fault is None:
        return _log is not None
    return not ops or (_fault.layer is None and _fault.op in ops)


class _Flip(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, fault: Fault, layer: int | None, op: str, rank: int
    ) -> torch.Tensor:
        out = flip_one_ulp(fault, tensor, layer=layer, op=op, rank=rank)
        return out.view_as(out) if out is tensor else out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient, None, None, None, None


def flip(layer: int | None, op: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy with one ulp flipped where the fault names this place; no gradient."""
    if _fault is None:
        return tensor
    return flip_one_ulp(_fault, tensor, layer=layer, op=op, rank=_rank)


def entering(layer: int | None, op: str, tensor: torch.Tensor, name: str = "input") -> None:
    """What enters `op` as `name`, [rows, ...]: recorded where taps are on."""
    if _log is not None:
        _log.record(layer, op, tensor, name)


def tap_value(layer: int | None, op: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tap` for a tensor inside another op's forward, which carries no gradient."""
    calls[op if layer is None else f"{layer}.{op}"] += 1
    tensor = flip(layer, op, tensor)
    if _log is not None:
        _log.record(layer, op, tensor)
    return tensor


def tap(layer: int | None, op: str, tensor: torch.Tensor) -> torch.Tensor:
    """The result of `op` in `layer` (0-based; None outside the layers) passes through here.

    tensor: [rows, ...], any dtype. Returns it, or a faulty copy whose gradient passes unchanged.
    """
    calls[op if layer is None else f"{layer}.{op}"] += 1
    if _fault is not None and (_fault.layer, _fault.op) == (layer, op):
        tensor = apply(_Flip, tensor, _fault, layer, op, _rank)
    if _log is not None:
        _log.record(layer, op, tensor)
    return tensor
