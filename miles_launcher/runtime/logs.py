"""Each process writes one log file, so that a dead one can be quoted."""

from __future__ import annotations

import os
import sys
from collections import deque
from pathlib import Path


def redirect_output(path: str) -> None:
    """Send this process's stdout and stderr, and its children's, to the end of `path`."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def last_lines(path: Path, count: int = 15) -> list[str]:
    """The last lines of a log; empty where this machine holds no such file."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=count)]
    except OSError:
        return []
