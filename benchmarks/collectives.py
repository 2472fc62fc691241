"""Ordered sums over ranks against NCCL's all-reduce, one process a GPU of this host.

    PYTHONPATH=. python3 -m benchmarks.collectives out.json [--world N] [--shared-gpu]

Replays of captured graphs, in alternating rounds; a time is the median over rounds of the slowest
rank. A sum whose bits differ from the reference's is given no time. `row linear` is the sum as the
row-parallel linear calls it, its message written into the stage; `all-reduce` copies it there
first. Both round fp32 sums to bf16; NCCL's fp32 is the same message, its bf16 half of it.

Exit code 1 when any bits differ, 2 with fewer than two GPUs. `--shared-gpu` checks the bits of N
processes on one GPU and measures nothing: processes that take turns have no speed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.product_timing import _environment
from miles_launcher.conformance.bits import differing
from sglang_patch.ops import RankGroup, tree_all_reduce, tree_reduce_scatter
from sglang_patch.ops.tree_all_reduce import op, reference
from sglang_patch.ops.tree_all_reduce.kernel import launch_one_shot, launch_two_shot
from sglang_patch.ops.tree_all_reduce.transport import connect

HIDDEN = 2560
ROWS = (1, 16, 64, 256, 512, 1024, 2048, 8192)
SHARED_ROWS = (1, 64, 2048)
# Large enough for one shot to be timed beyond its threshold.
_ONE_SHOT_BYTES = 16 << 20
_ROUNDS, _ROUND_MILLISECONDS = 9, 4.0

Call = Callable[[], Any]


def _message(rows: int, rank: int) -> torch.Tensor:
    """fp32 partial sums of ordinary size: pairs of large ones that cancel, so that order shows."""
    generator = torch.Generator(device="cuda").manual_seed(1000 * rows + rank)
    rest = torch.randn(rows, HIDDEN, device="cuda", generator=generator)
    generator.manual_seed(1000 * rows + 500 + rank // 2)
    large = torch.randn(rows, HIDDEN, device="cuda", generator=generator)
    return rest + (1 - 2 * (rank % 2)) * (2.0**12, 2.0**20)[rank // 2 % 2] * large


def _calls(x: torch.Tensor, ranks: RankGroup) -> dict[str, Call]:
    """Every way to sum `x` into bf16; each returns [rows, HIDDEN]."""
    bf16 = torch.bfloat16
    calls: dict[str, Call] = {"all-reduce": lambda: tree_all_reduce(x, ranks, out_dtype=bf16)}
    workspace = ranks.transport.workspace
    if workspace is None:
        return calls
    staged = op.stage(*x.shape, x.dtype, ranks)
    if staged is not None:
        staged.copy_(x)
        calls["row linear"] = lambda: tree_all_reduce(staged, ranks, out_dtype=bf16)
    out = torch.empty_like(x, dtype=bf16)
    if x.numel() * 4 <= workspace.areas.one_shot_bytes:

        def one_shot() -> torch.Tensor:
            launch_one_shot(x, None, out, workspace, span=0, columns=HIDDEN)
            return out

        calls["one shot"] = one_shot
    workspace.staged(x.dtype)[workspace.rank][: x.numel()].copy_(x.view(-1))

    def two_shots() -> torch.Tensor:
        launch_two_shot(
            x.dtype, None, out, workspace, numel=x.numel(),
            share=op._share(x.numel(), ranks.size), gather=True, span=0, columns=HIDDEN,
        )  # fmt: skip
        return out

    calls["two shots"] = two_shots
    return calls


def _slowest(value: float, ranks: RankGroup) -> float:
    """The largest of the ranks' values, on every rank."""
    found: list[Any] = [None] * ranks.size
    dist.all_gather_object(found, value, group=ranks.group)
    return float(max(found))


def _times(calls: dict[str, Call], ranks: RankGroup) -> dict[str, float]:
    """Median microseconds of each call, of the slowest rank."""
    graphs = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        took = _slowest(max(start.elapsed_time(stop), 0.01), ranks)
        number = int(min(100, max(3, _ROUND_MILLISECONDS / took)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(number):
                call()
        graphs[name] = (graph, number)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_ROUNDS + 1):
        for name, (graph, number) in list(graphs.items())[:: 1 if turn % 2 else -1]:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            dist.barrier(group=ranks.group)
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            took = _slowest(start.elapsed_time(stop), ranks) / number * 1e3
            if turn:
                times[name].append(took)
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def _row(rows: int, ranks: RankGroup, timed: bool) -> dict[str, Any]:
    """Bits, then times, of one number of rows."""
    x = _message(rows, ranks.rank)
    parts = [_message(rows, rank) for rank in range(ranks.size)]
    expected = reference.combine(parts, None, 1).to(torch.bfloat16)
    calls = _calls(x, ranks)
    wrong = {name: differing(call(), expected) for name, call in calls.items()}
    scattered = tree_reduce_scatter(x, ranks, out_dtype=torch.bfloat16)
    share = scattered.shape[0]
    mine = expected[ranks.rank * share : (ranks.rank + 1) * share]
    wrong["reduce-scatter"] = differing(scattered[: mine.shape[0]], mine)
    total = int(_slowest(sum(wrong.values()), ranks))
    row: dict[str, Any] = {"rows": rows, "differing": total, "by_form": wrong}
    if total or not timed:
        return row
    if ranks.transport.workspace is not None:
        # The stage holds whatever came last; times do not depend on it.
        calls["reduce-scatter"] = lambda: tree_reduce_scatter(x, ranks, out_dtype=torch.bfloat16)
    for name, dtype in (("nccl bf16", torch.bfloat16), ("nccl fp32", torch.float32)):
        buffer = torch.zeros(rows, HIDDEN, device="cuda", dtype=dtype)
        calls[name] = lambda buffer=buffer: dist.all_reduce(buffer, group=ranks.group)
    del parts, expected
    row["us"] = times = _times(calls, ranks)
    best = times.get("row linear", times["all-reduce"])
    row["over_nccl_fp32"] = round(best / times["nccl fp32"], 3)
    row["over_nccl_bf16"] = round(best / times["nccl bf16"], 3)
    return row


def _rank(rank: int, world: int, shared: bool, folder: str, out: str) -> None:
    if shared:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", 0 if shared else rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if shared else "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        device_id=None if shared else device,
    )
    form: Any = "symmetric memory" if shared else None
    transport = connect(dist.group.WORLD, device, form, one_shot_bytes=_ONE_SHOT_BYTES)
    ranks = RankGroup.of(dist.group.WORLD)
    rows: list[dict[str, Any]] = []
    for number in SHARED_ROWS if shared else ROWS:
        rows.append(_row(number, ranks, timed=not shared))
        if rank == 0:
            about = {"world": world, "hidden": HIDDEN, "rank_sums": transport.describe()}
            Path(out).write_text(json.dumps({**_environment(), **about, "rows": rows}, indent=1))
            print(json.dumps(rows[-1]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str]) -> int:
    """Start the ranks; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--world", type=int, default=0)
    parser.add_argument("--shared-gpu", action="store_true")
    chosen = parser.parse_args(arguments)
    present = torch.cuda.device_count()
    world = chosen.world or (4 if chosen.shared_gpu else 1 << max(0, present.bit_length() - 1))
    if present < 1 or (not chosen.shared_gpu and (present < 2 or present < world)):
        print(
            f"{present} GPUs here: sums over ranks are timed between at least two, one process "
            "each (--shared-gpu checks their bits on one)",
            file=sys.stderr,
        )
        return 2
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(world, chosen.shared_gpu, folder, str(chosen.out)), nprocs=world)
    rows = json.loads(chosen.out.read_text())["rows"]
    return 1 if any(row["differing"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
