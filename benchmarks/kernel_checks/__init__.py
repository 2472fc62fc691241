"""Conformance of the kernels on the device at hand: one function a claim.

Each function raises AssertionError where a claim fails and returns what it compared. Claims of
exact bits are against the CPU reference; where the inner order of a product is the tensor core's
own, the claim is that bits do not move with tile, rows or shards, and the distance to fp64 is
bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .attention import attention_flash3, attention_triton
from .elementwise import exponentials, log_softmax, pair_sums, rms_norm, rope, silu_mul
from .hopper import hopper_entries
from .products import linear, row_linear_invariance, row_linear_order
from .registration import public_ops
from .setting import FULL, SMALL, Setting

__all__ = ["CHECKS", "FULL", "SMALL", "Setting", "missing_requirement"]

CHECKS: Mapping[str, Callable[[Setting], str]] = {
    check.__name__: check
    for check in (
        exponentials,
        pair_sums,
        rms_norm,
        rope,
        silu_mul,
        log_softmax,
        linear,
        row_linear_order,
        row_linear_invariance,
        hopper_entries,
        attention_triton,
        attention_flash3,
        public_ops,
    )
}


def missing_requirement(name: str, device: str) -> str | None:
    """Why a check cannot run here, or None."""
    if name != "attention_flash3":
        return None
    if device == "cpu" or torch.cuda.get_device_capability()[0] != 9:
        return "not run: FA3 needs a Hopper GPU"
    try:
        import sgl_kernel.flash_attn  # noqa: F401
    except ImportError as error:
        return f"not run: {error}"
    return None
