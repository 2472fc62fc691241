"""Time calls against each other as replays of captured graphs, in turn; count launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

_ROUNDS, _ROUND_MILLISECONDS = 5, 2.0
_MOST_CALLS, _FEWEST_CALLS = 50, 3


def _milliseconds(call: Callable[[], Any]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def medians(calls: Mapping[str, Callable[[], Any]], stream: torch.cuda.Stream) -> dict[str, float]:
    """Median microseconds of each call. All are captured on `stream`, so that a backward pass can
    be one: its forward pass must have run there."""
    graphs = {}
    for name, call in calls.items():
        with torch.cuda.stream(stream):
            call()
            once = _milliseconds(call)
        number = int(max(_FEWEST_CALLS, min(_MOST_CALLS, _ROUND_MILLISECONDS / max(once, 0.004))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(number):
                call()
        graphs[name] = (graph, number)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_ROUNDS + 1):
        # Every other round backwards: whoever follows a pause finds higher clocks.
        for name, (graph, number) in list(graphs.items())[:: 1 if turn % 2 else -1]:
            elapsed = _milliseconds(graph.replay)
            if turn:
                times[name].append(elapsed / number * 1e3)
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def launches(call: Callable[[], Any]) -> int:
    """How many kernels and copies one call starts on the GPU."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == device for event in profile.events())
