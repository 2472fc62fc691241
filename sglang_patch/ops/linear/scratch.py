"""What a product needs beside its operands: counters of programs that add a tile's parts together
(zero between launches), and a thread that the driver knows."""

from __future__ import annotations

import threading
from typing import Final

import torch

_LEAST: Final = 1 << 14
# Keys: (device, stream); stream None: what graphs captured on the device use.
_HELD: dict[tuple[int, int | None], torch.Tensor] = {}
# Smaller sets that graphs captured earlier still write to: freed, they would be other tensors.
_CAPTURED: list[torch.Tensor] = []
# Devices whose context is current on this thread.
_seen = threading.local()


def counters(x: torch.Tensor, number: int) -> torch.Tensor:
    """At least `number` int32 zeros on x's device; the last program of each tile leaves a zero.

    One set a stream, for launches on a stream do not overlap, and one for all captured graphs of
    the device, which therefore must not be replayed at the same time. A capture that no launch
    preceded zeroes its own on every replay. No host synchronisation.
    """
    stream = torch.cuda.current_stream(x.device)
    device = stream.device_index
    capturing = torch.cuda.is_current_stream_capturing()
    key = (device, None if capturing else stream.cuda_stream)
    held = _HELD.get(key)
    if held is not None and held.numel() >= number:
        return held
    fresh = x.new_zeros(max(number, _LEAST), dtype=torch.int32)
    if not capturing:
        _HELD[key] = fresh
        captured = _HELD.get((device, None))
        if captured is None or captured.numel() < number:
            _CAPTURED.extend([] if captured is None else [captured])
            _HELD[device, None] = x.new_zeros(fresh.numel(), dtype=torch.int32)
    return fresh


def make_context_current(x: torch.Tensor) -> None:
    """Once a thread and device: make the device's context the thread's current one.

    The driver describes no tensor to the copy engine on a thread without a context, such as
    autograd's where backward begins with a product. The first memset on a thread gives it one.
    """
    devices: set[int] = _seen.__dict__.setdefault("devices", set())
    if x.device.index not in devices:
        x.new_zeros(1)
        devices.add(x.device.index)
