"""One run of the suite: the device, the folder, the files in it, the exit code."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from . import certificate
from .context import Target
from .machine import about
from .properties import Result, Status
from .setting import FULL, SMALL
from .subject import Subject
from .suite import run_suite, select

EXACT, FAILED, INTERRUPTED = 0, 3, 130


class View(Protocol):
    """Whoever shows a run to a person."""

    def begin(self, names: Sequence[str], title: str) -> None: ...

    def started(self, op: str, name: str) -> None: ...

    def finished(self, result: Result) -> None: ...

    def end(self, results: Sequence[Result], lines: Sequence[str]) -> None: ...


def target_of(device: str) -> Target:
    """`auto` is cuda where PyTorch sees a GPU. `ValueError` for an unknown name, or no GPU."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device!r}: choose from auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: PyTorch sees no GPU here; choose cpu, or run on a GPU host"
        )
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def default_out(target: Target) -> Path:
    """A folder of this run's own, below `runs`."""
    base = Path("runs") / f"conform-{target}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidate, number = base, 1
    while candidate.exists():
        number += 1
        candidate = base.with_name(f"{base.name}-{number}")
    return candidate


def conform(
    *,
    device: str,
    ops: Sequence[str],
    out: Path | None,
    quick: bool,
    view: View,
    subject: Subject | None = None,
) -> int:
    """Run the suite and write its files into `out`.

    Returns 0 where nothing failed ("not shown" is no failure, and no certificate of completeness
    either), 3 where something did, 130 where it was interrupted: then what was known stays in
    `conformance.partial.json`. Raises `ValueError` for what cannot be run as asked.
    """
    names, target = select(ops), target_of(device)
    setting = SMALL if quick else FULL[target]
    out = out or default_out(target)
    if (out / certificate.CERTIFICATE_FILE).exists():
        raise ValueError(f"--out {out}: holds a certificate already; choose another name")
    out.mkdir(parents=True, exist_ok=True)
    facts = about(target)
    began, date = time.perf_counter(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    results: list[Result] = []

    def made() -> certificate.Certificate:
        seconds = time.perf_counter() - began
        return certificate.make(results, date=date, setting=setting.name, seconds=seconds, **facts)

    view.begin(names, f"conformance on {facts['device'].name}, {setting.name} size")
    try:
        for result in run_suite(
            names, target=target, setting=setting, subject=subject, started=view.started
        ):
            if results and result.op != results[-1].op:
                # A crash of the device, or of this process, must not take what is known with it.
                certificate.write(made(), out, partial=True)
            results.append(result)
            view.finished(result)
    except KeyboardInterrupt:
        path = certificate.write(made(), out, partial=True)
        view.end(results, [f"interrupted; what was known: {path}"])
        return INTERRUPTED
    whole = made()
    path = certificate.write(whole, out, partial=False)
    view.end(results, [_sentence(whole), f"certificate: {path}"])
    return EXACT if whole.ok else FAILED


def _sentence(whole: certificate.Certificate) -> str:
    count = {status: len(whole.cells(status)) for status in Status}
    compared = sum(cell.compared for cells in whole.results.values() for cell in cells.values())
    parts = [f"{count[Status.OK]} properties of {len(whole.results)} ops shown"]
    parts += [
        f"{count[status]} {status.value}"
        for status in (Status.FAILED, Status.NOT_SHOWN)
        if count[status]
    ]
    state = "complete" if whole.complete else "not complete"
    text = ", ".join(parts)
    return f"{text}; {compared:,} elements compared in {whole.seconds:.0f} s: {state}"


def failures(results: Sequence[Result]) -> list[str]:
    """A line for every cell that failed or was not shown."""
    wanted: Any = (Status.FAILED, Status.NOT_SHOWN)
    return [
        f"{r.op} {r.property}: {r.status.value}: {r.detail.strip()}"
        for r in results
        if r.status in wanted
    ]
