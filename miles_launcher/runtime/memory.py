"""Memory of processes, from the kernel's own accounting."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def _field(pid: int, name: str) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def peak_bytes(pids: Iterable[int]) -> int:
    """Sum of each process's peak resident memory (VmHWM), shared pages counted in each; a process
    that is gone counts as 0. An upper bound of what they held together."""
    return sum(_field(pid, "VmHWM") for pid in set(pids))


def alive(pids: Iterable[int]) -> list[int]:
    """The processes that still run (a zombie has ended)."""
    running = []
    for pid in set(pids):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (OSError, IndexError):
            continue
        if state not in "ZX":
            running.append(pid)
    return running
