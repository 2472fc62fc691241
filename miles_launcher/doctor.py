"""`miles doctor`: is what is installed here what the hooks and layers were written against?"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .devices import cpu_ids, visible_gpus
from .render import CPU_PLATFORM, PLUGIN

# The hooks and layers are checked against these releases and no others.
PINS: Mapping[str, str] = MappingProxyType(
    {
        "torch": "2.11.0",
        "triton": "3.6.0",
        "sglang": "0.5.17",
        "megatron-core": "0.16.1",
        "hydra-core": "1.3.8",
    }
)
# Present at any release: the launcher uses only their stable surface.
REQUIRED = ("ray", "transformers", "safetensors", "tokenizers")
ENTRY_POINTS = (("sglang.srt.plugins", PLUGIN), ("sglang.srt.platforms", CPU_PLATFORM))


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding; `detail` says what was found and, where broken, what to do."""

    name: str
    ok: bool
    detail: str


def examine() -> list[Check]:
    """All findings. Imports SGLang and Megatron: several seconds."""
    checks = [Check(name="python", ok=True, detail=platform.python_version())]
    checks += [_version(name, pin) for name, pin in PINS.items()]
    checks += [_version(name, None) for name in REQUIRED]
    gpus = visible_gpus()
    checks.append(Check(name="devices", ok=True, detail=f"{gpus} GPUs, {len(cpu_ids())} CPU cores"))
    checks += [_entry_point(group, name) for group, name in ENTRY_POINTS]
    checks += _guarded("sglang_patch hooks", _hook_targets)
    checks += _guarded("megatron_patch layers", _megatron_layers)
    return checks


def _version(name: str, pin: str | None) -> Check:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name=name, ok=False, detail=f"not installed; pip install {name}=={pin or '*'}")
    # A local suffix names the build (2.11.0+cu130), not another release.
    if pin is not None and found.partition("+")[0] != pin:
        return Check(name=name, ok=False, detail=f"{found} installed, {pin} supported")
    return Check(name=name, ok=True, detail=found)


def _entry_point(group: str, name: str) -> Check:
    registered = [entry.name for entry in importlib.metadata.entry_points(group=group)]
    if name in registered:
        return Check(name=f"{group}: {name}", ok=True, detail="registered")
    return Check(
        name=f"{group}: {name}",
        ok=False,
        detail="not registered, so SGLang would serve stock kernels; pip install ./sglang_patch",
    )


def _guarded(name: str, examine_part: Callable[[], list[Check]]) -> list[Check]:
    try:
        return examine_part()
    except Exception as error:  # whatever an import raises here is the finding
        return [Check(name=name, ok=False, detail=f"{type(error).__name__}: {error}")]


def _hook_targets() -> list[Check]:
    plugin = importlib.import_module("sglang_patch.plugin")
    checks = []
    for row in plugin.check_targets():
        state = "unchanged" if row.unchanged else "changed" if row.found else "missing"
        checks.append(
            Check(
                name=f"hook {row.target}",
                ok=bool(row.found and row.unchanged),
                detail=f"{state}: {row.detail}",
            )
        )
    if not checks:
        return [Check(name="sglang_patch hooks", ok=False, detail="no hook is registered")]
    return checks


def _megatron_layers() -> list[Check]:
    importlib.import_module("megatron.core")
    provider = importlib.import_module("megatron_patch.provider")
    if not hasattr(provider, "SGLangSpecProvider"):
        return [Check(name="megatron_patch", ok=False, detail="no SGLangSpecProvider in provider")]
    return [Check(name="megatron_patch", ok=True, detail="SGLangSpecProvider imports")]
