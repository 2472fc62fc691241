"""`silu_mul`: checks, dispatch and shape inference."""

from __future__ import annotations

import torch

from ..formats import NAMESPACE, eager_on_gpu, require
from . import reference


@torch.library.custom_op(f"{NAMESPACE}::silu_mul", mutates_args=(), device_types="cpu")
def _silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return reference.silu_mul(gate_up).contiguous()


@_silu_mul.register_kernel("cuda")
def _(gate_up: torch.Tensor) -> torch.Tensor:
    from .kernel import launch_silu_mul

    return launch_silu_mul(gate_up)


@_silu_mul.register_fake
def _(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` for gate_up = [..., 2 * intermediate], gate first, bf16.

    Returns [..., intermediate] in the input dtype; fp32 inside, one rounding. Raises `ValueError`
    on an odd last dimension.
    """
    require(
        gate_up.shape[-1] % 2 == 0,
        f"silu_mul: last dimension {gate_up.shape[-1]} must hold gate and up, so be even",
    )
    if eager_on_gpu(gate_up):
        from .kernel import launch_silu_mul

        return launch_silu_mul(gate_up)
    return _silu_mul(gate_up)
