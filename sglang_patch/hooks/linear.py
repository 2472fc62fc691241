"""`sglang.srt.layers.linear`: column-parallel linears by one accumulator, row-parallel by the tree.

Upstream surfaces: `UnquantizedLinearMethod.apply` (qkv, gate_up) and `RowParallelLinear.forward`
(o_proj, down_proj), which here includes the sum over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import state
from ..ops import linear, row_linear
from .target import Hook


def apply(
    original: Callable[..., torch.Tensor],
    self: Any,
    layer: Any,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """A linear whose K no rank cuts; x: [tokens, K] bf16 -> [tokens, N] bf16."""
    place = layer.true_on_policy_place
    state.entering(place.op, x, place.layer)
    return state.tap(place.op, linear(x, layer.weight, bias))


def row_forward(
    original: Callable[..., Any],
    self: Any,
    input_: torch.Tensor,
    skip_all_reduce: bool = False,
    forward_batch: Any = None,
    output_tensor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """The whole sum, over local K and ranks; input_: [tokens, K_local] bf16 -> [tokens, N] bf16.

    `reduce_results` is not consulted: where SGLang leaves the sum over ranks to the communicator
    (o_proj), the communicator's hook leaves it to us.
    """
    place = self.true_on_policy_place
    if skip_all_reduce or output_tensor is not None or not self.input_is_parallel:
        raise ValueError(
            f"layer {place.layer} {place.op}: skip_all_reduce, caller-owned output and unsplit "
            "input have no place in a contract; turn off the feature that asks for them"
        )
    if self.skip_bias_add and self.bias is not None:
        raise ValueError(f"layer {place.layer} {place.op}: the contract says where the bias goes")
    live = state.require()
    state.entering(place.op, input_, place.layer)
    out = row_linear(
        input_, self.weight, self.bias, reduction=self.true_on_policy_reduction, ranks=live.ranks
    )
    return state.tap(place.op, out), None


HOOKS = (
    Hook(
        name="linear",
        target="sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
        digest="ee14848df6ec570b",
        replacement=apply,
    ),
    Hook(
        name="row_linear",
        target="sglang.srt.layers.linear.RowParallelLinear.forward",
        digest="26ac97999f204a9e",
        replacement=row_forward,
    ),
)
