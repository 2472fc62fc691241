"""Every benchmark on the GPU present, after the proof that its ops are right.

    PYTHONPATH=. python3 -m benchmarks FOLDER [--only NAME ...] [--certificate FILE]

Runs the conformance suite for the ops concerned (or takes the certificate of a complete run of
the same text on the same GPU), then each benchmark as a process of its own, which writes
FOLDER/NAME.json. A benchmark whose ops failed, or which needs more GPUs, is refused and reports
nothing. FOLDER/summary.json says what ran. Exit code 0: all that were asked for ran; 1: one ended
with an error; 2: wrong arguments, or no GPU; 3: a red proof refused one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.suite import Benchmark, refusal, select
from miles_launcher.conformance.certificate import CERTIFICATE_FILE, Certificate, read
from miles_launcher.conformance.machine import about

_COMPILERS = max(1, min(16, (os.cpu_count() or 2) - 1))
# A benchmark's own exit code for "the bits are other ones, so there is no time".
_OTHER_BITS = 1


def _python(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


def _certificate(folder: Path, given: Path | None, ops: set[str]) -> Certificate:
    """The proof to go by. `ValueError` where a given one is of another text or another GPU."""
    if given is None:
        out = folder / "conformance"
        asked = [part for op in sorted(ops) for part in ("--op", op)]
        subprocess.run(
            _python("miles_launcher.conformance", "--device", "cuda", "--out", str(out), *asked),
            check=False,
        )
        given = out / CERTIFICATE_FILE
        if not given.is_file():
            raise ValueError(f"the conformance suite left no {given}: see what it printed")
    found = read(given)
    facts = about("cuda")
    mine = (facts["digests"]["ops_digest"], facts["device"].name, facts["versions"]["torch"])
    theirs = (found.ops_digest, found.device.name, found.versions.get("torch"))
    if mine != theirs:
        raise ValueError(
            f"{given} is of ops, GPU and torch {theirs}, here are {mine}: leave out --certificate"
        )
    return found


def _run(benchmark: Benchmark, folder: Path) -> int:
    out = folder / f"{benchmark.name}.json"
    if benchmark.compiles:
        jobs = [
            subprocess.Popen(_python(benchmark.module, "--compile", str(i), str(_COMPILERS)))
            for i in range(_COMPILERS)
        ]
        # The measuring run compiles what a failed one left out, and says what is wrong with it.
        for job in jobs:
            job.wait()
    return subprocess.run(_python(benchmark.module, str(out)), check=False).returncode


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks", allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="where the JSON files go")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--certificate", type=Path, help="conformance.json of this text and GPU")
    options = parser.parse_args(arguments)
    try:
        chosen = select(options.only)
        if not torch.cuda.is_available():
            raise ValueError("PyTorch sees no GPU here; benchmarks run on a GPU host")
        gpus = torch.cuda.device_count()
        options.folder.mkdir(parents=True, exist_ok=True)
        ops = {op for benchmark in chosen if gpus >= benchmark.gpus for op in benchmark.ops}
        proof = _certificate(options.folder, options.certificate, ops)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    entries: list[dict[str, Any]] = []
    summary = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": asdict(proof.device),
        "versions": proof.versions,
        "ops_digest": proof.ops_digest,
        "gpus": gpus,
        "benchmarks": entries,
    }
    for benchmark in chosen:
        began = time.perf_counter()
        reason = refusal(benchmark, proof, gpus)
        code = None if reason else _run(benchmark, options.folder)
        seconds = round(time.perf_counter() - began, 1)
        entries.append(
            {"name": benchmark.name, "refused": reason, "exit_code": code, "seconds": seconds}
        )
        (options.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        print(f"{benchmark.name}: {'refused: ' + reason if reason else f'exit code {code}'}")
    if any(entry["exit_code"] for entry in entries):
        return _OTHER_BITS
    red = [e for e in entries if e["refused"] and not e["refused"].startswith("needs ")]
    return 3 if red else 0


if __name__ == "__main__":
    sys.exit(main())
