"""What a result is about: the machine, the releases, and the text that ran."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import re
from pathlib import Path

from ..devices import gpu_name, host_facts, version_of

_PACKAGES = ("sglang_patch", "megatron_patch", "miles_launcher")
_RELEASES = ("torch", "triton", "sglang", "megatron-core", "ray", "numpy")
_SUFFIXES = (".py", ".yaml")


def versions() -> dict[str, str | None]:
    """Releases, the driver and the kernel package."""
    facts = host_facts()
    return {
        "python": platform.python_version(),
        **{name: version_of(name) for name in _RELEASES},
        "sgl_kernel": facts["sgl_kernel"],
        "driver": facts["driver"],
    }


def source_digest() -> str:
    """SHA-256 (hex) over the text of the three packages, wherever they are installed."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise ValueError(f"package {package} is not installed here; see the README")
        folder = Path(next(iter(found.submodule_search_locations)))
        for path in sorted(folder.rglob("*")):
            if path.suffix in _SUFFIXES and "build" not in path.relative_to(folder).parts:
                digest.update(f"{package}/{path.relative_to(folder).as_posix()}\n".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def device_name(device: str) -> str:
    """`NVIDIA H200` -> `h200`; `cpu`."""
    if device != "cuda":
        return "cpu"
    words = re.sub(r"[^a-z0-9]+", "-", (gpu_name() or "gpu").lower()).strip("-")
    return words.removeprefix("nvidia-")
