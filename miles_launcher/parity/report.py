"""`report.json`: what a run showed, complete after every step and after every kind of end."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPORT_FILE = "report.json"


@dataclass(slots=True, kw_only=True)
class StepReport:
    """One step. `compared`: the gate saw it; `complete`: it went on to its end. `seconds` per
    phase; `weights_digest` of both sides after the sync (without training: as they stand). What a
    phase did not reach is None."""

    step: int
    compared: bool = False
    complete: bool = False
    compared_tokens: int = 0
    mismatched_tokens: int = 0
    max_abs_diff: float = 0.0
    reward_mean: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    entropy: float | None = None
    weights_digest: dict[str, str | None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    mismatches: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Report:
    """The run. `ok` only where every step asked for was compared and equal. `ended` is one of
    `running`, `complete`, `gate closed`, `process died`, `configuration`, `interrupted`."""

    model: str
    contract: str
    segments: int
    layout: dict[str, int]
    device: str
    versions: dict[str, str]
    steps_planned: int
    ok: bool = False
    ended: str = "running"
    message: str = ""
    exit_code: int | None = None
    fingerprint: dict[str, Any] = field(default_factory=dict)
    start_seconds: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    steps: list[StepReport] = field(default_factory=list)

    def totals(self) -> tuple[int, int, float]:
        """(compared tokens, mismatched tokens, largest difference) over all steps."""
        return (
            sum(s.compared_tokens for s in self.steps),
            sum(s.mismatched_tokens for s in self.steps),
            max((s.max_abs_diff for s in self.steps), default=0.0),
        )

    def finish(self, ended: str, exit_code: int, message: str = "") -> None:
        """Set the end once; `ok` follows from it and from what was compared."""
        self.ended, self.exit_code, self.message = ended, exit_code, message
        compared, mismatched, _ = self.totals()
        self.ok = (
            exit_code == 0
            and len(self.steps) == self.steps_planned
            and all(step.complete for step in self.steps)
            and compared > 0
            and mismatched == 0
        )

    def write(self, out: Path) -> Path:
        """Write `report.json` into `out`, whole or not at all; returns its path."""
        path = out / REPORT_FILE
        temporary = out / f".{REPORT_FILE}.{os.getpid()}"
        # An infinite difference (a NaN on one side) has no JSON number.
        text = json.dumps(_finite(asdict(self)), indent=2, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.rename(path)
        return path


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def read_steps(out: Path) -> list[StepReport]:
    """The steps of an earlier report in `out`; `ValueError` naming the file where it is broken."""
    path = out / REPORT_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return [StepReport(**step) for step in data["steps"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot read the earlier report ({error})") from None
