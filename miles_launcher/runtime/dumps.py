"""What a rank's taps recorded, between processes: plain arrays, and files that are whole."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any


def as_arrays(value: Any) -> Any:
    """Tensors in nested dictionaries and lists as NumPy arrays."""
    if isinstance(value, dict):
        return {name: as_arrays(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_arrays(item) for item in value]
    return value.numpy() if hasattr(value, "numpy") else value


def read_dump(path: Path) -> dict[str, Any]:
    """The record in a rank's file. Raises `ValueError` naming one that is missing or not whole."""
    import torch

    if not path.is_file():
        raise ValueError(f"{path}: missing; this rank left no record of its taps")
    try:
        dump = torch.load(path, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path}: not a whole record of taps ({error})") from None
    arrays: dict[str, Any] = as_arrays(dump)
    return arrays
