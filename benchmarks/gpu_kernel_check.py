"""Run every kernel conformance check on the GPU present and write JSON.

    PYTHONPATH=. python3 benchmarks/gpu_kernel_check.py [out.json]

Needs torch and Triton alone; FA3 is reported as not run where sgl_kernel is missing. Without an
argument the report goes to $OUT/gpu_kernel_check.json. Exit code 1 when a check fails, 2 without
a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import triton
from triton.errors import TritonError

from benchmarks.kernel_checks import CHECKS, FULL, missing_requirement

# What a check may raise: a failed claim, a refusal, a compiler's or a launch's error.
_FAILURES = (AssertionError, ValueError, TypeError, RuntimeError, TritonError)


def _report(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "capability": [properties.major, properties.minor],
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
        },
        "ok": set(results) == set(CHECKS)
        and all(r["status"] != "failed" for r in results.values()),
        "checks": results,
    }


def run_checks(path: Path) -> bool:
    """Run all; `path` is rewritten after each check, so that a crash keeps what is known."""
    results: dict[str, dict[str, Any]] = {}
    for name, check in CHECKS.items():
        start = time.perf_counter()
        reason = missing_requirement(name, FULL.device)
        if reason:
            status, detail = "not run", reason
        else:
            try:
                status, detail = "passed", check(FULL)
            except _FAILURES:
                status, detail = "failed", traceback.format_exc(limit=-3)
        seconds = round(time.perf_counter() - start, 2)
        results[name] = {"status": status, "detail": detail, "seconds": seconds}
        print(f"{name}: {status} in {seconds} s: {detail}", flush=True)
        path.write_text(json.dumps(_report(results), indent=2) + "\n")
    return bool(_report(results)["ok"])


def main(arguments: list[str]) -> int:
    """Write the report; the exit code of the module's docstring."""
    if not torch.cuda.is_available():
        print("gpu_kernel_check: no GPU here", file=sys.stderr)
        return 2
    if arguments:
        path = Path(arguments[0])
    elif "OUT" in os.environ:
        path = Path(os.environ["OUT"]) / "gpu_kernel_check.json"
    else:
        print("gpu_kernel_check: name a report file, or set OUT", file=sys.stderr)
        return 2
    path.parent.mkdir(parents=True, exist_ok=True)
    ok = run_checks(path)
    print(f"wrote {path}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
