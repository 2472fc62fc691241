"""Checkpoints of a run: Hugging Face folders with the optimizer beside them, whole or not there."""

from __future__ import annotations

from pathlib import Path

CHECKPOINTS = "checkpoints"
_PREFIX = "step-"
# Written last: a folder without it was interrupted and is not resumed from.
_COMPLETE = "complete"


def checkpoint_folder(out: Path, steps_done: int) -> Path:
    """`<out>/checkpoints/step-000003` for the weights after three steps."""
    return out / CHECKPOINTS / f"{_PREFIX}{steps_done:06d}"


def finish_checkpoint(folder: Path) -> None:
    """Mark a checkpoint as whole."""
    (folder / _COMPLETE).write_text("\n")


def newest_checkpoint(out: Path) -> tuple[int, Path] | None:
    """(steps done, folder) of the newest whole checkpoint, or None."""
    whole = [
        (int(folder.name.removeprefix(_PREFIX)), folder)
        for folder in (out / CHECKPOINTS).glob(f"{_PREFIX}*")
        if (folder / _COMPLETE).is_file()
    ]
    return max(whole, default=None)
