"""Sums over ranks on one GPU: processes that share it, torch's symmetric memory, real waits.

Run by `test_collectives.py`; every rank saves what it found.

    python one_gpu_ranks.py FOLDER WORLD

The processes take turns on the GPU, so a wait lasts milliseconds: sizes and counts are small.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from miles_launcher.conformance.bits import random
from sglang_patch.ops import RankGroup, row_linear, tree_all_reduce, tree_reduce_scatter
from sglang_patch.ops.tree_all_reduce.transport import connect, form_calls
from sglang_patch.schema.reduction import row_reduction

BF16, FP32 = torch.bfloat16, torch.float32
ONE_SHOT_BYTES, STAGED_BYTES = 1 << 16, 1 << 20
COLUMNS = 40
V1, V2 = "qwen3_dense_true_on_policy_v1", "qwen3_dense_true_on_policy_v2"

# name: (rows, dtype of the message, dtype of the sum, parts of which the first takes the bias or 0)
SUMS = {
    "one shot": (3, FP32, BF16, 0),
    "one shot, bias at the root": (400, FP32, BF16, 1),
    "one shot, bf16 tree": (100, BF16, BF16, 4),
    "two shots": (500, FP32, BF16, 0),
    "two shots, bias at the root": (2047, FP32, BF16, 1),
    "two shots, bf16 tree": (1500, BF16, BF16, 4),
    "two shots, fp32 out": (1500, FP32, FP32, 0),
    "in pieces": (16001, FP32, BF16, 1),
}
SCATTERS = {
    "scatter": (400, FP32, BF16, 0),
    "scatter, missing rows": (401, FP32, BF16, 1),
    "scatter, fewer rows than ranks": (3, BF16, BF16, 2),
    "scatter in pieces": (16001, FP32, BF16, 1),
}
GRAPH_CALLS, REPLAYS = 3, 4
ROW_K, ROW_N = 1024, 96
ROW_ROWS = (5, 1000)


def message(name: str, rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank brings: ranks 0 and 1 large numbers that cancel, ranks 2 and 3 larger ones."""
    seed = 7 * sum(name.encode()) + rows
    rest = random(rows, COLUMNS, seed=seed + rank, dtype=FP32)
    scale = (2.0**12, 2.0**20) if dtype == FP32 else (2.0**3, 2.0**7)
    pair, sign = scale[rank // 2 % 2], 1 - 2 * (rank % 2)
    large = random(rows, COLUMNS, seed=seed + 50 + rank // 2, dtype=FP32)
    return (rest + sign * pair * large).to(dtype)


def bias() -> torch.Tensor:
    """The bias of every sum that has one."""
    return random(COLUMNS, seed=5)


def graph_message(replay: int, call: int, rank: int) -> torch.Tensor:
    """Inputs of a captured graph: `call` 0 and 2 go in one shot, 1 in two."""
    return message(f"graph {replay} {call}", rank, (30, 900, 200)[call], FP32)


def row_operands(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and bias of a row-parallel linear."""
    return random(rows, ROW_K, seed=1), random(ROW_N, ROW_K, seed=2), random(ROW_N, seed=3)


def reductions(world: int) -> dict[str, Any]:
    """The contracts' sums over K."""
    return {"v2": row_reduction(V2, ROW_K), "v1": row_reduction(V1, ROW_K, rollout_tp=world)}


def _captured(ranks: RankGroup, device: torch.device) -> dict[str, torch.Tensor]:
    inputs = [graph_message(0, call, ranks.rank).to(device) for call in range(GRAPH_CALLS)]

    def calls() -> list[torch.Tensor]:
        return [tree_all_reduce(x, ranks, out_dtype=BF16) for x in inputs]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = calls()
    found = {}
    for replay in range(REPLAYS):
        for call, x in enumerate(inputs):
            x.copy_(graph_message(replay, call, ranks.rank))
        graph.replay()
        # An eager call between replays: the epochs go on.
        between = tree_all_reduce(inputs[0], ranks, out_dtype=BF16)
        for call, out in enumerate(outs):
            found[f"graph {replay} {call}"] = out.cpu()
        found[f"between {replay}"] = between.cpu()
    return found


def _rank(rank: int, world: int, folder: str) -> None:
    # A rank that waits for a dead one waits long: end it from outside of the wait.
    faulthandler.dump_traceback_later(90.0, exit=True)
    began = time.perf_counter()
    torch.set_num_threads(1)
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    ranks = RankGroup.of(dist.group.WORLD)
    transport = connect(
        dist.group.WORLD,
        device,
        "symmetric memory",
        one_shot_bytes=ONE_SHOT_BYTES,
        staged_bytes=STAGED_BYTES,
    )
    found: dict[str, Any] = {"transport": transport.describe()}
    seconds: dict[str, float] = {"start": time.perf_counter() - began}

    def timed(name: str, results: dict[str, torch.Tensor]) -> None:
        torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - began
        found.update(results)

    for names, function in ((SUMS, tree_all_reduce), (SCATTERS, tree_reduce_scatter)):
        for name, (rows, dtype, out_dtype, parts) in names.items():
            out = function(
                message(name, rank, rows, dtype).to(device),
                ranks,
                bias=bias().to(device) if parts else None,
                bias_ranks=min(parts, world) or 1,
                out_dtype=out_dtype,
            )
            timed(name, {name: out.cpu()})
    for contract, reduction in reductions(world).items():
        for rows in ROW_ROWS:
            x, weight, row_bias = (t.to(device) for t in row_operands(rows))
            cut = slice(rank * ROW_K // world, (rank + 1) * ROW_K // world)
            out = row_linear(x[:, cut], weight[:, cut], row_bias, reduction=reduction, ranks=ranks)
            name = f"row_linear {contract} {rows}"
            timed(name, {name: out.cpu()})
    timed("graph", _captured(ranks, device))
    found |= {"forms": dict(form_calls), "seconds": seconds}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(_rank, args=(int(sys.argv[2]), sys.argv[1]), nprocs=int(sys.argv[2]))
