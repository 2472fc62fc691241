"""`sglang.srt.layers.activation.SiluAndMul`: one kernel on both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import state
from ..ops import silu_mul
from .target import Hook


def forward(original: Callable[..., Any], self: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """x: [tokens, 2 * intermediate_local] bf16, gate first -> [tokens, intermediate_local]."""
    if args:
        raise ValueError("silu_mul: a clamp limit is not part of the contract")
    state.entering("silu_mul", x)
    return state.tap("silu_mul", silu_mul(x.contiguous()))


HOOKS = (
    Hook(
        name="silu_mul",
        target="sglang.srt.layers.activation.SiluAndMul.forward",
        checked="sglang.srt.layers.activation.SiluAndMul.forward_native",
        digest="14b495349c7e4f21",
        replacement=forward,
    ),
)
