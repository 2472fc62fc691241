"""Time and memory of the command line on this machine: `miles plan`, and one whole run.

    .venv/bin/python benchmarks/cpu_run.py [OUT.json] [-- ARGUMENTS OF miles launch]

Writes JSON: the machine, the median of nine `miles plan` calls beside the median of a bare Python
start in the same loop, and of the run its wall seconds, seconds per phase, and peak memory: the
largest sum, over all its processes, of proportional resident memory (PSS, shared pages counted
once), sampled twice a second.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

MILES = [sys.executable, "-m", "miles_launcher.cli"]
RUN = ["launch", "qwen3-tiny", "--tp", "2", "--device", "cpu"]
PLAN = ["plan", "qwen3-4b", "--tp", "2", "--device", "cpu", "--json"]
REPEATS = 9


def seconds(command: list[str]) -> float:
    """Wall seconds of a command that must succeed."""
    start = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - start


def plan_latency() -> dict[str, float]:
    """Medians in seconds, taken in turn so that the machine's speed cancels in the ratio."""
    pairs = [
        (seconds([*MILES, *PLAN]), seconds([sys.executable, "-c", "pass"])) for _ in range(REPEATS)
    ]
    plan, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"plan_s": round(plan, 3), "python_start_s": round(bare, 3), "runs": len(pairs)}


def proportional_memory(root: psutil.Process) -> int:
    """PSS of a process and its descendants in bytes; one that ended meanwhile counts nothing."""
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def run(arguments: list[str]) -> dict[str, Any]:
    """One run to its end, watched from outside."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        start = time.monotonic()
        process = subprocess.Popen(
            [*MILES, *arguments, "--out", str(out)], stdout=subprocess.DEVNULL, cwd=folder
        )
        root, peak = psutil.Process(process.pid), 0
        while process.poll() is None:
            try:
                peak = max(peak, proportional_memory(root))
            except psutil.NoSuchProcess:
                break
            time.sleep(0.5)
        wall = time.monotonic() - start
        report = json.loads((out / "report.json").read_text())
    return {
        "arguments": arguments,
        "exit_code": process.wait(),
        "ok": report["ok"],
        "compared_tokens": sum(step["compared_tokens"] for step in report["steps"]),
        "wall_s": round(wall, 1),
        "start_s": report["start_seconds"],
        "step_s": [step["seconds"] for step in report["steps"]],
        "peak_pss_bytes": peak,
        "versions": report["versions"],
    }


def main() -> None:
    own, theirs = sys.argv[1:], RUN
    if "--" in own:
        cut = own.index("--")
        own, theirs = own[:cut], ["launch", *own[cut + 1 :]]
    if len(own) > 1:
        sys.exit(__doc__)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_before": os.getloadavg()[0],
        "plan": plan_latency(),
        "run": run(theirs),
    }
    text = json.dumps(result, indent=2)
    if own:
        Path(own[0]).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
