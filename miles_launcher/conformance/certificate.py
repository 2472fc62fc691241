"""`conformance.json`: what the suite showed, on which device, of which text. Standard library only.

While the suite runs, what is known so far is in `conformance.partial.json`; the certificate itself
appears whole, at the end of a run that came to its end.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..codec import from_data, to_data
from .properties import PROPERTIES, Result, Status

CERTIFICATE_FILE = "conformance.json"
PARTIAL_FILE = "conformance.partial.json"
FORMAT = 1
FULL_SETTING = "full"
# Every op of the suite, in the order of the table; a certificate of fewer is not complete.
OP_NAMES = (
    "elementary",
    "rms_norm",
    "linear",
    "rope_table",
    "rope",
    "qk_norm_rope",
    "attention",
    "row_linear_v1",
    "row_linear_v2",
    "tree_all_reduce",
    "silu_mul",
    "temperature",
    "log_softmax",
    "digest",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device: `kind` is cpu or cuda, `name` what a rank's fingerprint calls it. `capability`
    and `driver` are None on a CPU, and where the driver does not say."""

    kind: str
    name: str
    capability: str | None
    driver: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One op's outcome for one property, as `Result` has it."""

    status: str
    detail: str
    compared: int
    seconds: float
    degrees: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What was shown. `ok`: nothing failed. `complete`: every op and applicable property was
    shown, at full size. `digest` is SHA-256 over all other fields."""

    format: int
    date: str
    device: Machine
    versions: dict[str, str]
    ops_digest: str
    schema_digest: str
    contracts: dict[str, str]
    setting: str
    seconds: float
    results: dict[str, dict[str, Cell]]
    ok: bool
    complete: bool
    digest: str

    def cells(self, *statuses: Status, ops: Iterable[str] | None = None) -> list[tuple[str, str]]:
        """(op, property) of every cell with one of these outcomes, among `ops` or all."""
        chosen = self.results if ops is None else [op for op in ops if op in self.results]
        wanted = {status.value for status in statuses}
        return [
            (op, name)
            for op in chosen
            for name, cell in self.results[op].items()
            if cell.status in wanted
        ]


def make(
    results: Iterable[Result],
    *,
    date: str,
    device: Machine,
    versions: Mapping[str, str],
    digests: Mapping[str, str],
    contracts: Mapping[str, str],
    setting: str,
    seconds: float,
) -> Certificate:
    """A certificate of these results."""
    table: dict[str, dict[str, Cell]] = {}
    for r in results:
        table.setdefault(r.op, {})[r.property] = Cell(
            status=r.status.value,
            detail=r.detail,
            compared=r.compared,
            seconds=r.seconds,
            degrees=r.degrees,
        )
    draft = Certificate(
        format=FORMAT,
        date=date,
        device=device,
        versions=dict(versions),
        ops_digest=digests["ops_digest"],
        schema_digest=digests["schema_digest"],
        contracts=dict(contracts),
        setting=setting,
        seconds=round(seconds, 3),
        results=table,
        ok=False,
        complete=False,
        digest="",
    )
    ok, complete = _judged(draft)
    judged = replace(draft, ok=ok, complete=complete)
    return replace(judged, digest=_digest(judged))


def _judged(certificate: Certificate) -> tuple[bool, bool]:
    """(ok, complete), from the cells alone."""
    shown = bool(certificate.cells(Status.OK))
    ok = shown and not certificate.cells(Status.FAILED)
    whole = all(set(certificate.results.get(op, ())) == set(PROPERTIES) for op in OP_NAMES)
    missing = certificate.cells(Status.NOT_SHOWN)
    return ok, ok and whole and not missing and certificate.setting == FULL_SETTING


def _digest(certificate: Certificate) -> str:
    data = to_data(certificate)
    del data["digest"]
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write(certificate: Certificate, out: Path, *, partial: bool) -> Path:
    """Write into `out`, whole or not at all; a whole one takes the partial one's place."""
    path = out / (PARTIAL_FILE if partial else CERTIFICATE_FILE)
    temporary = out / f".{path.name}.{os.getpid()}"
    text = json.dumps(to_data(certificate), indent=2, allow_nan=False)
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.rename(path)
    if not partial:
        (out / PARTIAL_FILE).unlink(missing_ok=True)
    return path


def read(path: Path) -> Certificate:
    """The certificate in a file, or in a folder; `ValueError` naming the file and what is wrong."""
    if path.is_dir():
        path = path / CERTIFICATE_FILE
        if not path.exists() and (partial := path.with_name(PARTIAL_FILE)).exists():
            raise ValueError(
                f"{partial}: the conformance run there did not come to its end, so there is no "
                f"{CERTIFICATE_FILE}; run `miles conform` again"
            )
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{path}: cannot read the certificate ({error.strerror}); `miles conform --out DIR` "
            "writes one"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a certificate ({error.reason})") from None
    try:
        data: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: half-written or edited: {error.msg} at line {error.lineno} of "
            f"{len(text.splitlines())}; run `miles conform` again"
        ) from None
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path}: certificate format {found!r}, this launcher reads {FORMAT}")
    try:
        certificate = from_data(Certificate, data, "certificate")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if _digest(certificate) != certificate.digest:
        raise ValueError(
            f"{path}: the content is not what its digest says, so it was edited after it was "
            "written; run `miles conform` again"
        )
    if _judged(certificate) != (certificate.ok, certificate.complete):
        raise ValueError(f"{path}: ok and complete do not follow from the results")
    return certificate
