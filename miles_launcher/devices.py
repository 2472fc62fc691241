"""How many GPUs this machine offers, asked of the driver and never of torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from .policy import Device

_NVML = "libnvidia-ml.so.1"
_PROC = Path("/proc/driver/nvidia/gpus")


def _installed_gpus() -> int:
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        # No driver library; containers may still expose the driver's folder.
        return len(list(_PROC.iterdir())) if _PROC.is_dir() else 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    count = ctypes.c_uint(0)
    status = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return count.value if status == 0 else 0


def visible_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """GPUs that a process started now would see: those installed, cut to CUDA_VISIBLE_DEVICES."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return _installed_gpus()
    names: list[str] = []
    for name in (part.strip() for part in listed.split(",")):
        # CUDA stops at the first invalid entry, and so hides all that follow.
        if not name or name == "-1":
            break
        names.append(name)
    return min(len(names), _installed_gpus()) if names else 0


def resolve_device(device: str, gpus: int) -> Device:
    """`auto` is `cuda` where a GPU is visible. Raises `ValueError` for any other unknown name."""
    if device == "auto":
        return "cuda" if gpus else "cpu"
    if device == "cpu":
        return "cpu"
    if device == "cuda":
        return "cuda"
    raise ValueError(f"--device {device!r}: choose from auto, cpu, cuda")


def cpu_ids() -> tuple[int, ...]:
    """The cores that this process may run on, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))
