"""How many GPUs this machine offers, asked of the driver and never of torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
from collections.abc import Mapping
from pathlib import Path

from .policy import Device

_NVML = "libnvidia-ml.so.1"
_PROC = Path("/proc/driver/nvidia/gpus")
_PROC_VERSION = Path("/proc/driver/nvidia/version")
# SGLang's kernel package has been published under both names.
_KERNEL_PACKAGES = ("sglang-kernel", "sgl-kernel")


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


def version_of(distribution: str) -> str | None:
    """The installed release of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def host_facts() -> dict[str, str | None]:
    """What sets bits on this host and no fingerprint carries: `driver`, `capability` of the first
    GPU, `sgl_kernel`. None where there is none, or where it does not say."""
    driver, capability = _nvml_facts()
    if driver is None and _PROC_VERSION.is_file():
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _PROC_VERSION.read_text())
        driver = found.group(1) if found else None
    kernels = [version for name in _KERNEL_PACKAGES if (version := version_of(name))]
    return {
        "driver": driver,
        "capability": capability,
        "sgl_kernel": kernels[0] if kernels else None,
    }


def _nvml_facts() -> tuple[str | None, str | None]:
    """(driver version, compute capability of the first GPU) as the driver's library says."""
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return None, None
    if nvml.nvmlInit_v2() != 0:
        return None, None
    text = ctypes.create_string_buffer(96)
    driver = None
    if nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))) == 0:
        driver = text.value.decode()
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    capability = None
    if (
        nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(device)) == 0
        and nvml.nvmlDeviceGetCudaComputeCapability(
            device, ctypes.byref(major), ctypes.byref(minor)
        )
        == 0
    ):
        capability = f"{major.value}.{minor.value}"
    nvml.nvmlShutdown()
    return driver, capability


def gpu_name() -> str | None:
    """The first GPU as the driver's library names it, such as `NVIDIA H200`; None without one."""
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    text, device = ctypes.create_string_buffer(96), ctypes.c_void_p()
    found = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(device)) == 0 and (
        nvml.nvmlDeviceGetName(device, text, ctypes.c_uint(len(text))) == 0
    )
    nvml.nvmlShutdown()
    return text.value.decode() if found else None


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
