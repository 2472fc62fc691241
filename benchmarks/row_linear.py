"""Row-parallel linears of Qwen3 against torch.mm, on the GPU present.

    PYTHONPATH=. python3 -m benchmarks.row_linear out.json

K is one rank's share; at TP=1 the result is rounded to bf16, at TP>1 it is the fp32 partial sum
(torch.mm's is bf16: half the bytes). Exit code 1 when any entry gives other bits than the general
kernel, 2 without a GPU. `--compile I N` compiles every N-th shape, to be run N at a time before.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.product_timing import Shape, main
from sglang_patch.ops.row_linear.kernel import TILES, launch_row_linear_partial

# model: (hidden, K of o_proj, K of down_proj)
_MODELS = {
    "0.6B": (1024, 2048, 3072),
    "4B": (2560, 4096, 9728),
    "8B": (4096, 4096, 12288),
    "32B": (5120, 8192, 25600),
}
_ROWS = (1, 16, 64, 128, 256, 2048, 8192)
_LARGE = {1: 1.05, 2: 1.12, 4: 1.20, 8: 1.30}


def shapes() -> list[Shape]:
    """Every layer, TP 1, 2 and 4, and every number of segments a rank can own."""
    found = []
    for model, (hidden, *ks) in _MODELS.items():
        for layer, k in zip(("o_proj", "down_proj"), ks, strict=True):
            for tp in (1, 2, 4):
                for leaves in (1, 2, 4, 8):
                    for rows in _ROWS if leaves * tp <= 8 else ():
                        found.append(
                            Shape(
                                layer=f"{model} {layer} TP={tp}",
                                rows=rows,
                                columns=hidden,
                                k=k // tp,
                                leaves=leaves,
                                out_dtype="bfloat16" if tp == 1 else "float32",
                                target=_LARGE[leaves] if rows >= 2048 else 1.15,
                            )
                        )
    return found


def _product(x: torch.Tensor, weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    dtype = getattr(torch, shape.out_dtype)
    run = min(shape.leaves, 2)
    return launch_row_linear_partial(x, weight, shape.leaves, run, torch.float32, out_dtype=dtype)


def _general(x: torch.Tensor, weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    run = min(shape.leaves, 2)
    total = launch_row_linear_partial(x, weight, shape.leaves, run, torch.float32, tile=TILES[-1])
    return total.to(getattr(torch, shape.out_dtype))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], shapes(), _product, _general))
