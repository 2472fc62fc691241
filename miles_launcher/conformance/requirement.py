"""`--require-certificate`: what a launch asks of a certificate before it starts (`live.py`: once
every rank is up). Standard library only.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..devices import host_facts, version_of
from ..schema.fingerprint import text_digest
from .certificate import FULL_SETTING, OP_NAMES, Certificate, read
from .properties import PROPERTIES, Status

# The copies that the ranks run; each is held to the certified text where it is installed here.
PACKAGES = ("sglang_patch", "megatron_patch")
_VERSIONS = ("torch", "triton")
_ROW_LINEAR = {"tiles": "row_linear_v1", "segments": "row_linear_v2"}
_SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificatePlan:
    """The certificate that a run was started under, with what every rank must turn out to be."""

    path: str
    digest: str
    device: str
    capability: str | None
    driver: str | None
    sgl_kernel: str | None
    ops_digest: str
    schema_digest: str
    versions: dict[str, str]


def ops_of(row_linear_order: str) -> tuple[str, ...]:
    """The ops of a plan whose contract adds K in this order: all but the other contract's sum."""
    other = {name for order, name in _ROW_LINEAR.items() if order != row_linear_order}
    return tuple(name for name in OP_NAMES if name not in other)


def require(
    path: Path, *, row_linear_order: str, device: str, degrees: Sequence[int], local: bool
) -> CertificatePlan:
    """The certificate in `path` (a file, or the folder of `miles conform`), judged for a plan.

    row_linear_order: the contract's; device: cpu or cuda; degrees: the tensor-parallel degrees in
    use; local: whether the run is on this machine, whose driver then counts. Raises `ValueError`
    with every reason why it does not cover the plan.
    """
    certificate = read(path)
    problems = [
        *_shown(certificate, ops_of(row_linear_order), degrees),
        *_text(certificate),
        *_machine(certificate, device, local),
    ]
    if problems:
        again = f"miles conform --device {device} --out DIR"
        raise ValueError(
            f"--require-certificate {path}: " + "; ".join(problems) + f"; make one with `{again}`"
        )
    return CertificatePlan(
        path=str(path.expanduser().absolute()),
        digest=certificate.digest,
        device=certificate.device.name,
        capability=certificate.device.capability,
        driver=certificate.device.driver,
        sgl_kernel=certificate.versions.get("sgl_kernel"),
        ops_digest=certificate.ops_digest,
        schema_digest=certificate.schema_digest,
        versions={name: certificate.versions.get(name, "absent") for name in _VERSIONS},
    )


def _listed(cells: Sequence[tuple[str, str]]) -> str:
    more = f" and {len(cells) - _SHOWN} more" if len(cells) > _SHOWN else ""
    return ", ".join(f"{op} {name}" for op, name in cells[:_SHOWN]) + more


def _shown(certificate: Certificate, ops: Sequence[str], degrees: Sequence[int]) -> list[str]:
    """Every op of the plan, every applicable property, at full size."""
    problems = []
    failed = certificate.cells(Status.FAILED)
    if failed:
        problems.append(f"failed: {_listed(failed)}")
    elif not certificate.ok:
        problems.append("nothing was shown")
    if certificate.setting != FULL_SETTING:
        problems.append(f"made at {certificate.setting} size, {FULL_SETTING} is required")
    absent = [
        (op, name)
        for op in ops
        for name in PROPERTIES
        if name not in certificate.results.get(op, {})
    ]
    if absent:
        problems.append(f"not in it: {_listed(absent)}")
    unshown = [
        (op, name)
        for op, name in certificate.cells(Status.NOT_SHOWN, ops=ops)
        if not _ranks_suffice(certificate, op, name, degrees)
    ]
    if unshown:
        problems.append(f"not shown: {_listed(unshown)}")
    return problems


def _ranks_suffice(certificate: Certificate, op: str, name: str, degrees: Sequence[int]) -> bool:
    """Real ranks of a degree that the plan does not use need not have been shown."""
    if name != "tp_ranks":
        return False
    return all(d == 1 or d in certificate.results[op][name].degrees for d in degrees)


def _text(certificate: Certificate) -> list[str]:
    """The text of the ops and the schema in each package installed here."""
    problems = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec is not None else []:
            for folder, certified in (
                ("ops", certificate.ops_digest),
                ("schema", certificate.schema_digest),
            ):
                here = folder_digest(Path(root) / folder)
                if here != certified:
                    problems.append(
                        f"{package}/{folder} is {here[:12]} here, {certified[:12]} was certified"
                    )
    return problems


def folder_digest(folder: Path) -> str:
    """As `ops.digest.source_digest`, without importing an op (and torch with it)."""
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.py")}
    return text_digest(files) if files else hashlib.sha256(b"").hexdigest()


def _machine(certificate: Certificate, device: str, local: bool) -> list[str]:
    problems = []
    made_on = certificate.device
    if made_on.kind != device:
        problems.append(f"made on {made_on.name} ({made_on.kind}), the plan runs on {device}")
    for name in _VERSIONS:
        here, there = version_of(name), certificate.versions.get(name)
        if here is not None and here != there:
            problems.append(f"{name} {here} is installed here, {there} was certified")
    if device == "cuda" and local and made_on.kind == "cuda":
        problems += facts_differ("here", made_on.driver, made_on.capability, None, host_facts())
    return problems


def facts_differ(
    where: str,
    driver: str | None,
    capability: str | None,
    sgl_kernel: str | None,
    facts: Mapping[str, str | None],
) -> list[str]:
    """What differs between a machine and the certified one. A driver that nobody could name is not
    shown to be the same."""
    problems = []
    wanted = {"driver": driver, "capability": capability, "sgl_kernel": sgl_kernel}
    for name, certified in wanted.items():
        live = facts.get(name)
        if name != "driver" and (certified is None or live is None):
            continue
        if certified is None or live != certified:
            problems.append(
                f"{name} {live or 'unknown'} {where}, {certified or 'unknown'} certified"
            )
    return problems
