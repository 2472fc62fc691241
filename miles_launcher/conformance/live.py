"""The certificate against the ranks that are up: the last word before the first token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..parity.gate import GateClosed
from .requirement import CertificatePlan, facts_differ


def check_live(
    plan: CertificatePlan,
    fingerprints: Mapping[str, Mapping[str, Any]],
    hosts: Mapping[str, Mapping[str, str | None]],
) -> None:
    """`GateClosed` unless what is live in every rank is what was certified.

    fingerprints: each side's, already equal over its ranks; hosts: `devices.host_facts` of each
    role's machine, by the role's name.
    """
    problems = []
    for side, fingerprint in fingerprints.items():
        wanted: dict[str, Any] = {
            "device": plan.device,
            "ops_digest": plan.ops_digest,
            "schema_digest": plan.schema_digest,
        }
        problems += [
            f"{side}: {name} {fingerprint.get(name)!r}, certified {value!r}"
            for name, value in wanted.items()
            if fingerprint.get(name) != value
        ]
        live = dict(fingerprint.get("versions", {}))
        problems += [
            f"{side}: {name} {live.get(name)!r}, certified {value!r}"
            for name, value in plan.versions.items()
            if live.get(name) != value
        ]
    if not fingerprints:
        problems.append("no rank reports a fingerprint")
    if plan.device != "cpu":
        for role, facts in hosts.items():
            problems += facts_differ(
                f"at {role}", plan.driver, plan.capability, plan.sgl_kernel, facts
            )
        if not hosts:
            problems.append("no role reports its machine")
    if problems:
        raise GateClosed(
            f"the certificate {plan.path} does not cover this run: " + "; ".join(problems)
        )
