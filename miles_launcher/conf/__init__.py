"""Composing `conf/` with Hydra: the typed schema first, then the YAML files, then what was typed.

Hydra and OmegaConf stay in this file. What leaves it is a frozen `Settings`; no worker ever sees
a DictConfig. Additions (`+key`), deletions (`~key`) and `hydra.` keys are refused: the schema is
the whole public surface.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..codec import from_data, to_data
from ..settings import Settings

CONF_DIR = Path(__file__).resolve().parent
MODEL_GROUP = "model"


def setting_keys() -> tuple[str, ...]:
    """Every key that may be typed as `key=value`, such as `run.temperature`."""

    def walk(data: Mapping[str, Any], prefix: str) -> list[str]:
        keys = []
        for name, value in data.items():
            nested = isinstance(value, dict)
            keys += walk(value, f"{prefix}{name}.") if nested else [f"{prefix}{name}"]
        return keys

    return tuple(walk(to_data(Settings()), ""))


def compose_settings(
    model: str, overrides: tuple[str, ...] = (), flags: Mapping[str, Any] | None = None
) -> Settings:
    """Settings for a model: its YAML, the typed `overrides`, then `flags` (setting key -> value).

    Raises `ValueError` for an unknown key (with the nearest known one), a value of another type, an
    unknown group choice, or a key that is given twice.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    flags = flags or {}
    _check_overrides(overrides, flags)
    _register_schema()
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            config = compose("config", overrides=[f"{MODEL_GROUP}={model}", *overrides])
        for key, value in flags.items():
            OmegaConf.update(config, key, value)
        data = OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_compact(error)) from None
    return from_data(Settings, data, "settings")


def _register_schema() -> None:
    from hydra.core.config_store import ConfigStore
    from omegaconf import DictConfig, OmegaConf

    def writable(node: Any) -> None:
        # A frozen dataclass makes a read-only node; composition has to write into it.
        if isinstance(node, DictConfig):
            node._set_flag("readonly", None)
            for key in node:
                writable(node._get_node(key))

    schema = OmegaConf.structured(Settings)
    writable(schema)
    ConfigStore.instance().store(name="settings_schema", node=schema, provider="miles_launcher")


def _check_overrides(overrides: tuple[str, ...], flags: Mapping[str, Any]) -> None:
    keys = setting_keys()
    groups = {path.name for path in CONF_DIR.iterdir() if path.is_dir()} - {"__pycache__"}
    seen: set[str] = set()
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals:
            raise ValueError(f"unexpected argument {text!r}: a setting is written key=value")
        if key == MODEL_GROUP or key == f"{MODEL_GROUP}.name":
            raise ValueError(f"{text!r}: the model is the first argument; do not set it twice")
        if key not in keys and key not in groups:
            near = difflib.get_close_matches(key, [*keys, *groups], n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(keys)}"
            raise ValueError(f"unknown setting {key!r} in {text!r}; {hint}")
        if key in seen:
            raise ValueError(f"setting {key!r} is given twice")
        if key in flags:
            raise ValueError(f"{key!r} is set by a flag ({flags[key]!r}) and again by {text!r}")
        seen.add(key)


def _compact(error: Exception) -> str:
    """One line of a Hydra error, with its cause: the part that says which value was wrong."""
    parts = [str(error)] + ([str(error.__cause__)] if error.__cause__ else [])
    lines = [line.strip() for part in parts for line in part.splitlines()]
    noise = ("full_key", "reference_type", "object_type", "Config search path", "provider=", "See ")
    return "; ".join(line for line in lines if line and not line.startswith(noise))
