"""One engine of `engine_throughput`: a process that starts it and times what it is told to.

Reads one JSON object a line from its standard input and answers each with one line. What the engine
prints goes to the log.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

_KINDS = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}
_TOP = 40


class Worker:
    """The engine and its random prompts, which no prefix cache has seen."""

    def __init__(self, kwargs: dict[str, Any], vocab_size: int, device: str) -> None:
        import sglang
        from sglang.srt.plugins import load_plugins

        load_plugins()
        self._engine = sglang.Engine(**kwargs)
        self._draw = random.Random(os.getpid())
        self._vocab, self._device = vocab_size, device
        self._seeded = bool(kwargs.get("enable_deterministic_inference"))

    def _generate(self, batch: int, length: int, new_tokens: int) -> float:
        """Seconds of one call with `batch` new prompts."""
        prompts = [[self._draw.randrange(self._vocab) for _ in range(length)] for _ in range(batch)]
        shared = {"temperature": 1.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        sampling = [
            {**shared, **({"sampling_seed": i} if self._seeded else {})} for i in range(batch)
        ]
        began = time.perf_counter()
        outputs = self._engine.generate(
            input_ids=prompts, sampling_params=sampling, return_logprob=True
        )
        seconds = time.perf_counter() - began
        counts = {len(out["meta_info"]["output_token_logprobs"]) for out in outputs}
        assert counts == {new_tokens}, counts
        return seconds

    def decode(self, batch: int, length: int, few: int, many: int) -> float:
        """Seconds of a decode step: the difference of two calls that prefill alike."""
        short = self._generate(batch, length, few)
        return (self._generate(batch, length, many) - short) / (many - few)

    def prefill(self, batch: int, length: int) -> float:
        """Seconds of a prefill of `batch` prompts."""
        return self._generate(batch, length, 1)

    def profile(self, batch: int, length: int, new_tokens: int) -> list[dict[str, Any]]:
        """Time per kernel (on a CPU: per op) of one call, by torch's profiler in the engine."""
        self._generate(batch, length, new_tokens)
        with tempfile.TemporaryDirectory() as folder:
            activity = "GPU" if self._device == "cuda" else "CPU"
            self._engine.start_profile(output_dir=folder, activities=[activity], with_stack=False)
            self._generate(batch, length, new_tokens)
            self._engine.stop_profile()
            return kernel_table(_whole_trace(Path(folder)), _KINDS[self._device])

    def shutdown(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()


def _whole_trace(folder: Path, patience: float = 60.0) -> list[dict[str, Any]]:
    """The events of the trace, once its file is whole."""
    deadline = time.monotonic() + patience
    while True:
        found = sorted(folder.rglob("*.trace.json.gz"))
        try:
            for path in found:
                with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
                    events: list[dict[str, Any]] = json.load(file)["traceEvents"]
                    return events
        except (EOFError, ValueError, OSError):
            # Still being written.
            found = []
        if time.monotonic() > deadline:
            raise TimeoutError(f"no whole trace in {folder}: {[p.name for p in folder.rglob('*')]}")
        time.sleep(0.2)


def kernel_table(events: list[dict[str, Any]], kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows `name`, `microseconds`, `calls`, `share`, the longest first."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in kinds:
            times[event["name"]].append(float(event["dur"]))
    whole = sum(sum(durations) for durations in times.values())
    rows = [
        {
            "name": name[:160],
            "microseconds": round(sum(durations), 1),
            "calls": len(durations),
            "share": round(sum(durations) / whole, 4),
        }
        for name, durations in times.items()
    ]
    return sorted(rows, key=lambda row: -row["microseconds"])[:_TOP]


def main() -> None:
    """`python -m benchmarks.engine_worker SPEC.json LOG`."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    answers = os.fdopen(os.dup(1), "w")
    log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(spec["env"])
    worker = Worker(spec["engine_kwargs"], spec["vocab_size"], spec["device"])
    print(json.dumps({"ready": True}), file=answers, flush=True)
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            value = getattr(worker, asked.pop("call"))(**asked)
            print(json.dumps({"value": value}), file=answers, flush=True)
    finally:
        worker.shutdown()


if __name__ == "__main__":
    main()
