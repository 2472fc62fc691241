"""The machine that a certificate is about, and the text that ran on it."""

from __future__ import annotations

import platform
from typing import Any

import torch

from ..devices import host_facts, version_of
from .certificate import Machine
from .context import Target
from .subject import CONTRACTS, text_digests


def machine(target: Target) -> Machine:
    """The first device of this kind, named as a rank's fingerprint names it."""
    if target != "cuda":
        return Machine(kind="cpu", name="cpu", capability=None, driver=None)
    major, minor = torch.cuda.get_device_capability()
    return Machine(
        kind="cuda",
        name=torch.cuda.get_device_name(),
        capability=f"{major}.{minor}",
        driver=host_facts()["driver"],
    )


def about(target: Target) -> dict[str, Any]:
    """What `certificate.make` is told beside the results."""
    facts = host_facts()
    versions = {
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "triton": version_of("triton"),
        "numpy": version_of("numpy"),
        "cuda": torch.version.cuda,
        "sgl_kernel": facts["sgl_kernel"],
    }
    return {
        "device": machine(target),
        "versions": {name: version for name, version in versions.items() if version},
        "digests": text_digests(),
        "contracts": {name: contract.digest() for name, contract in CONTRACTS.items()},
    }
