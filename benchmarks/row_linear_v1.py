"""Contract v1's row-parallel linears of Qwen3 against torch.mm, on the GPU present.

    PYTHONPATH=. python3 -m benchmarks.row_linear_v1 out.json

K is one rank's share; in and out are bf16, the call is `torch.ops.tp_inv_ops.matmul_tp_inv`. Exit
code 1 when any entry gives other bits than the general kernel, 2 without a GPU. `--compile I N`
compiles every N-th shape, to be run N at a time before. Where `published_us` is given, it is the
published kernel's median on an H200 in a run of its own; it was not timed here.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.product_timing import Shape, main, processors
from sglang_patch.ops import matmul_tp_inv
from sglang_patch.ops.row_linear.kernel import TILES, launch_row_linear_partial
from sglang_patch.ops.row_linear.table import LEAF_WIDTH, FewPlan, choose
from sglang_patch.schema.reduction import run_length

# (layer, N, K of one rank): 32, 76, 38 and 19 tiles, in runs of 2 or of 19.
_LAYERS = (
    ("4B o_proj TP=1", 2560, 4096),
    ("4B down_proj TP=1", 2560, 9728),
    ("4B down_proj TP=2", 2560, 4864),
    ("4B down_proj TP=4", 2560, 2432),
)
_ROWS = (1, 16, 64, 2048, 8192)
# (N, K): {rows: microseconds}
_PUBLISHED = {
    (2560, 4096): {1: 56.0, 64: 58.0, 2048: 219.0, 8192: 827.0},
    (2560, 9728): {1: 117.0, 64: 127.0, 2048: 580.0, 8192: 2340.0},
    (2560, 4864): {1: 47.0, 64: 47.0, 2048: 195.0, 8192: 742.0},
}


def shapes() -> list[Shape]:
    """Every layer at every number of rows."""
    return [
        Shape(
            layer=layer,
            rows=rows,
            columns=columns,
            k=k,
            leaves=k // LEAF_WIDTH,
            out_dtype="bfloat16",
            published_us=_PUBLISHED.get((columns, k), {}).get(rows),
        )
        for layer, columns, k in _LAYERS
        for rows in _ROWS
    ]


def _product(x: torch.Tensor, weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    return matmul_tp_inv(x, weight.t())


def _general(x: torch.Tensor, weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    run = run_length(shape.leaves)
    return launch_row_linear_partial(x, weight, shape.leaves, run, torch.bfloat16, tile=TILES[-1])


def _entry(shape: Shape) -> str:
    run = run_length(shape.leaves)
    entry = choose(shape.rows, shape.columns, shape.leaves, run, processors())
    if entry is None:
        return "general"
    if isinstance(entry, FewPlan):
        return f"few {entry.tile.block_n} in {entry.parts}"
    parts = f" in {entry.parts}{' (last wave)' if entry.mixed else ''}" if entry.parts > 1 else ""
    return f"{entry.tile.name}{parts} {entry.levels.places}".strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], shapes(), _product, _general, _entry))
