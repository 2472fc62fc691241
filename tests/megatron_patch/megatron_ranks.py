"""A pool of processes that act as trainer ranks: started once, they run one task after another."""

from __future__ import annotations

import importlib
import multiprocessing
import socket
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

TASK_TIMEOUT_S = 120.0


def _serve(connection: Connection) -> None:
    import warnings

    # megatron-core warns once per missing accelerator library; none is expected on a CPU.
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    while True:
        request = connection.recv()
        if request is None:
            return
        module, name, arguments = request
        try:
            result = getattr(importlib.import_module(module), name)(*arguments)
            connection.send((True, result))
        except Exception:
            connection.send((False, traceback.format_exc()))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RankPool:
    """`run(world, task, ...)` calls `megatron_tasks.task(rank, world, port, ...)` on every rank;
    `module:task` names another module."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def _grow(self, world: int) -> None:
        while len(self._workers) < world:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))

    def run(self, world: int, task: str, *arguments: Any) -> list[Any]:
        """Results in rank order; the first rank's error is raised with its traceback."""
        self._grow(world)
        port = free_port()
        used = self._workers[:world]
        module, _, function = task.rpartition(":")
        for rank, (_, connection) in enumerate(used):
            request = (module or "megatron_tasks", function, (rank, world, port, *arguments))
            connection.send(request)
        deadline = time.monotonic() + TASK_TIMEOUT_S
        results: list[Any] = [None] * world
        waiting = set(range(world))
        while waiting:
            for rank in sorted(waiting):
                process, connection = used[rank]
                if connection.poll(0.01):
                    good, value = connection.recv()
                    if not good:
                        self.close()
                        raise AssertionError(f"{task}, rank {rank} of {world}:\n{value}")
                    results[rank] = value
                    waiting.discard(rank)
                elif not process.is_alive() or time.monotonic() > deadline:
                    self.close()
                    raise AssertionError(f"{task}: no answer from rank {rank} of {world}")
        return results

    def close(self) -> None:
        """End every worker; a later `run` starts new ones."""
        for process, connection in self._workers:
            if process.is_alive():
                try:
                    connection.send(None)
                except OSError:
                    pass
        for process, connection in self._workers:
            process.join(timeout=2)
            if process.is_alive():
                process.terminate()
                process.join()
            connection.close()
        self._workers.clear()
