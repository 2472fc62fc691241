"""Column- and row-parallel linears with the contract's sums.

They replace `megatron.core.tensor_parallel.ColumnParallelLinear` and `RowParallelLinear`, and keep
their construction: parameter shapes, sharding attributes and checkpoint names stay megatron's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from .. import autograd
from ..ops import RankGroup

# Megatron names a linear at construction; the row-parallel ones are these two.
_ROW_LAYERS = {"proj": "o_proj", "fc2": "down_proj"}


class PolicyColumnLinear(ColumnParallelLinear):
    """x @ weight.T + bias, this rank's output columns; K is never cut. One rounding, to bf16.

    The bias is added inside the op, in fp32, whatever `skip_bias_add` says: the second result is
    always None.
    """

    def __init__(self, *args: Any, stride: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, stride=stride, **kwargs)
        self.stride = stride
        self.ranks = RankGroup.of(self.tp_group)
        self.out_dtype = "bfloat16"

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """input_: [..., K] bf16, the same on every rank -> ([..., N / tp] bf16, None)."""
        if self.gather_output or runtime_gather_output:
            raise ValueError("PolicyColumnLinear: gathered output is not covered; gather after it")
        weight = self.weight if weight is None else weight
        out = autograd.linear(
            input_,
            weight,
            self.bias,
            ranks=self.ranks,
            stride=self.stride,
            out_dtype=self.out_dtype,
        )
        return out, None


class PolicyRowLinear(RowParallelLinear):
    """x @ weight.T + bias with K over the ranks, added in the contract's order."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        tp_comm_buffer_name: str,
        **kwargs: Any,
    ) -> None:
        super().__init__(input_size, output_size, tp_comm_buffer_name=tp_comm_buffer_name, **kwargs)
        self.ranks = RankGroup.of(self.tp_group)
        self.reduction = self.config.policy.row_reduction(_ROW_LAYERS[tp_comm_buffer_name])
        assert self.reduction.k_global == input_size, (self.reduction, input_size)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """input_: [..., K / tp] bf16 -> ([..., N] bf16 on every rank, None)."""
        out = autograd.row_linear(
            input_, self.weight, self.bias, reduction=self.reduction, ranks=self.ranks
        )
        return out, None
