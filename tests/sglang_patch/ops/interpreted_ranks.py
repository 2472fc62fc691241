"""The kernels over shared memory, between real processes: Triton's interpreter, CPU memory.

Not collected by name: `test_shared_memory_ranks.py` runs this file with TRITON_INTERPRET=1 and
reads what every rank saved. The ranks' buffers are shared tensors, the flags are set and awaited as
on GPUs, by processes that really run at the same time.

    python interpreted_ranks.py FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.multiprocessing as mp

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_shared_memory_ranks.py"

import bf16_interpreter
import triton.runtime.interpreter as interpreter

from miles_launcher.conformance.bits import random
from sglang_patch.ops.tree_all_reduce.kernel import launch_one_shot, launch_two_shot
from sglang_patch.ops.tree_all_reduce.workspace import Areas, Workspace

COLUMNS = 6
ONE_SHOT_BYTES, STAGED_BYTES = 1 << 13, 1 << 16
POLLS = 200_000

# In order: (form, rows, dtype of the message, dtype of the sum, ranks under the bias or 0).
CALLS: tuple[tuple[str, int, torch.dtype, torch.dtype, int], ...] = (
    ("one", 3, torch.float32, torch.bfloat16, 0),
    ("one", 300, torch.float32, torch.bfloat16, -1),
    ("two", 700, torch.float32, torch.bfloat16, -1),
    ("one", 200, torch.bfloat16, torch.bfloat16, 1),
    ("scatter", 50, torch.float32, torch.bfloat16, 0),
    ("two", 900, torch.float32, torch.float32, 0),
    ("two", 11, torch.bfloat16, torch.bfloat16, 2),
    ("scatter", 37, torch.bfloat16, torch.bfloat16, -1),
    ("one", 2, torch.float32, torch.float32, 0),
    ("one", 340, torch.float32, torch.bfloat16, 0),
    ("one", 340, torch.float32, torch.bfloat16, 0),
    ("one", 340, torch.float32, torch.bfloat16, 0),
)


def message(call: int, rank: int) -> torch.Tensor:
    """What a rank brings to a call: ranks 0 and 1 large numbers that cancel, ranks 2 and 3 larger
    ones, so that another order rounds the small rest away, whatever it is rounded to after."""
    _, rows, dtype, _, _ = CALLS[call]
    rest = random(rows, COLUMNS, seed=100 * call + rank, dtype=torch.float32)
    scale = (2.0**12, 2.0**20) if dtype == torch.float32 else (2.0**3, 2.0**7)
    pair, sign = scale[rank // 2 % 2], 1 - 2 * (rank % 2)
    large = random(rows, COLUMNS, seed=100 * call + 50 + rank // 2, dtype=torch.float32)
    return (rest + sign * pair * large).to(dtype)


def bias_of(call: int) -> torch.Tensor | None:
    """The call's bias, the same on every rank."""
    return random(COLUMNS, seed=900 + call) if CALLS[call][4] else None


def share_of(rows: int, world: int) -> int:
    """Rows that a rank owns."""
    return -(-rows // world)


def _yielding(original: Any) -> Any:
    """An atomic operation that lets the other ranks run: a GPU has all of them at once."""

    def run(*arguments: Any) -> Any:
        time.sleep(0.001)
        return original(*arguments)

    return run


def _call(number: int, rank: int, workspace: Workspace, world: int) -> torch.Tensor:
    form, rows, dtype, out_dtype, span = CALLS[number]
    span = world if span < 0 else span
    x, bias = message(number, rank), bias_of(number)
    common: dict[str, Any] = {"span": span, "columns": COLUMNS, "polls": POLLS}
    if form == "one":
        out = torch.full_like(x, 7.0, dtype=out_dtype)
        launch_one_shot(x, bias, out, workspace, **common)
        return out
    workspace.staged(dtype)[workspace.rank][: x.numel()] = x.view(-1)
    if form == "two":
        out = torch.full_like(x, 7.0, dtype=out_dtype)
        share = -(-x.numel() // world)
        launch_two_shot(
            dtype, bias, out, workspace, numel=x.numel(), share=share, gather=True, **common
        )
        return out
    share = share_of(rows, world)
    out = torch.full((share, COLUMNS), 7.0, dtype=out_dtype)
    launch_two_shot(
        dtype, bias, out, workspace,
        numel=x.numel(), share=share * COLUMNS, gather=False, **common,
    )  # fmt: skip
    return out


# name: (ranks, whose place each rank takes: the fault has ranks 1 and 2 in each other's).
GROUPS: dict[str, tuple[int, tuple[int, ...]]] = {
    "two ranks": (2, (0, 1)),
    "four ranks": (4, (0, 1, 2, 3)),
    "ranks in each other's place": (4, (0, 2, 1, 3)),
}


def _rank(rank: int, shared: dict[str, list[torch.Tensor]], folder: str) -> None:
    torch.set_num_threads(1)
    bf16_interpreter.install()
    builder = interpreter.InterpreterBuilder
    builder.create_atomic_rmw = _yielding(builder.create_atomic_rmw)
    # It copies every tensor back after a launch: here all ranks see the memory itself.
    interpreter.GridExecutor._restore_args_dev = lambda *arguments: None
    results: dict[Any, torch.Tensor] = {}
    for name, (world, places) in GROUPS.items():
        if rank >= world:
            continue
        areas = Areas(world, ONE_SHOT_BYTES, STAGED_BYTES)
        workspace = Workspace(places[rank], areas, shared[name])
        for number in range(len(CALLS)):
            results[name, number] = _call(number, rank, workspace, world)
        results[name, "epochs"] = workspace.epochs
    torch.save(results, f"{folder}/{rank}.pt")


if __name__ == "__main__":
    buffers = {
        name: [
            torch.zeros(
                Areas(world, ONE_SHOT_BYTES, STAGED_BYTES).total, dtype=torch.uint8
            ).share_memory_()
            for _ in range(world)
        ]
        for name, (world, _) in GROUPS.items()
    }
    mp.spawn(_rank, args=(buffers, sys.argv[1]), nprocs=4)
