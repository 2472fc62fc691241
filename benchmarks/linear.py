"""Column-parallel linears and lm_head of Qwen3 against torch.mm, on the GPU present.

    PYTHONPATH=. python3 -m benchmarks.linear out.json

Arguments and exit codes as in `benchmarks.row_linear`. lm_head writes fp32 logits; torch.mm's bf16
ones are half the bytes, so its fp32 form is reported beside it.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.product_timing import Shape, main
from sglang_patch.ops.linear.kernel import TILES, launch_linear

_LAYERS = (
    ("0.6B qkv", 4096, 1024, "bfloat16"),
    ("0.6B gate_up", 6144, 1024, "bfloat16"),
    ("4B qkv", 6144, 2560, "bfloat16"),
    ("4B gate_up", 19456, 2560, "bfloat16"),
    ("8B gate_up", 24576, 4096, "bfloat16"),
    ("32B gate_up", 51200, 5120, "bfloat16"),
    ("4B lm_head", 151936, 2560, "float32"),
)
_ROWS = (1, 16, 64, 128, 256, 2048, 8192)


def shapes() -> list[Shape]:
    """Every layer at every number of rows; logits of at most 2048 rows."""
    return [
        Shape(layer, rows, columns, k, 1, dtype, 1.05)
        for layer, columns, k, dtype in _LAYERS
        for rows in _ROWS
        if dtype == "bfloat16" or rows <= 2048
    ]


def _product(x: torch.Tensor, weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    return launch_linear(x, weight, None, getattr(torch, shape.out_dtype))


def _general(x: torch.Tensor, weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    return launch_linear(x, weight, None, getattr(torch, shape.out_dtype), tile=TILES[-1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], shapes(), _product, _general))
