"""Real ranks: processes of their own, gloo on a CPU, over symmetric memory or NCCL on GPUs.

Where there are fewer GPUs than ranks, ranks share them: symmetric memory between processes that
take turns, and gloo for what it does not carry. That is slow, and the same kernels and waits.

One start serves every degree and every op: the ranks form the largest group, and the smaller ones
are subgroups of its first ranks.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, spawn

from .checks.rank_jobs import RANK_JOBS
from .context import Context, Target
from .properties import Mismatch, NotShown
from .setting import Setting
from .subject import Subject, connect, cpu_subject, ops

DEGREES = (2, 4, 8)
_TIMEOUT_SECONDS = 180.0
# As many ranks as an order needs to show itself may share a GPU, taking turns; more would be slow.
_SHARED_RANKS = 4
# Small areas of symmetric memory: the jobs' messages then take every form, and pieces.
_AREAS = {"one_shot_bytes": 1 << 12, "staged_bytes": 1 << 16}

Results = dict[int, list[dict[str, dict[str, torch.Tensor]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What every rank is told; travels to another process."""

    world: int
    degrees: tuple[int, ...]
    names: tuple[str, ...]
    folder: str
    target: Target
    subject: Subject
    setting: Setting


def _rank(rank: int, task: _Task) -> None:
    torch.set_num_threads(1)
    backend, device = "gloo", torch.device("cpu")
    shared = False
    if task.target == "cuda":
        present = torch.cuda.device_count()
        shared = present < task.world
        device = torch.device("cuda", rank % present)
        torch.cuda.set_device(device)
        if shared:
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        else:
            backend = "nccl"
    address = f"file://{task.folder}/store"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=task.world)
    ctx = Context(
        subject=task.subject, setting=task.setting, target=task.target, reference=cpu_subject()
    )
    found: dict[int, dict[str, dict[str, torch.Tensor]]] = {}
    for degree in task.degrees:
        group = dist.new_group(list(range(degree)))
        if rank >= degree:
            continue
        connect(group, device, "symmetric memory" if shared else None, **_AREAS)
        ranks = ops.RankGroup.of(group)
        results = {name: RANK_JOBS[name][0](ctx, ranks) for name in task.names}
        found[degree] = {
            name: {label: t.cpu() for label, t in tensors.items()}
            for name, tensors in results.items()
        }
    torch.save(found, f"{task.folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@dataclass(slots=True)
class RankRun:
    """The ranks' results, computed on first need and kept for the other ops."""

    names: tuple[str, ...]
    _results: Results | None = field(default=None)

    def degrees(self, ctx: Context) -> tuple[int, ...]:
        """The degrees that can be real here."""
        if ctx.target == "interpreter":
            raise NotShown("the interpreter runs in one process")
        most = max(ctx.setting.ranks)
        if ctx.target == "cuda":
            most = min(most, max(_SHARED_RANKS, torch.cuda.device_count()))
        return tuple(d for d in DEGREES if d <= most)

    def check(self, ctx: Context, name: str) -> str:
        """Every rank of every degree has the oracle's bits."""
        degrees = self.degrees(ctx)
        if self._results is None:
            self._results = _start(ctx, degrees, self.names) if degrees else {}
        for degree in degrees:
            expected = RANK_JOBS[name][1](ctx, degree)
            for rank, found in enumerate(self._results[degree]):
                if found[name].keys() != expected.keys():
                    raise Mismatch(f"{degree} ranks, rank {rank}: {sorted(found[name])}")
                for label, wanted in expected.items():
                    at = f"{degree} ranks, rank {rank}: {label}"
                    ctx.equal(found[name][label], wanted, at)
        ctx.degrees = degrees
        shown = f"degrees {list(degrees)}, every rank, with and without a bias where there is one"
        if ctx.target == "cuda":
            shown += f"; {max(degrees)} processes on {torch.cuda.device_count()} GPUs"
        missing = [d for d in DEGREES if d in ctx.setting.ranks and d not in degrees]
        if missing:
            raise NotShown(f"{shown}; degrees {missing} need as many GPUs", degrees)
        return shown


def _start(ctx: Context, degrees: tuple[int, ...], names: tuple[str, ...]) -> Results:
    with tempfile.TemporaryDirectory(prefix="miles-conform-") as folder:
        task = _Task(
            world=max(degrees),
            degrees=degrees,
            names=names,
            folder=folder,
            target=ctx.target,
            subject=ctx.subject,
            setting=ctx.setting,
        )
        _wait(spawn(_rank, args=(task,), nprocs=task.world, join=False))
        loaded = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(task.world)]
    return {degree: [loaded[rank][degree] for rank in range(degree)] for degree in degrees}


def _wait(started: ProcessContext) -> None:
    """Until every rank has ended; none is left behind, whatever happens."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    try:
        while not started.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise Mismatch(f"the ranks did not end within {_TIMEOUT_SECONDS:.0f} s")
    finally:
        for process in started.processes:
            if process.is_alive():
                process.terminate()
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join()
