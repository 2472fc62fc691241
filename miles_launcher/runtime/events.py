"""TensorBoard event files, written with TensorBoard's own writer: the head node loads no torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..parity.report import StepReport


class StepEvents:
    """Scalars of each step in an event file below `folder`."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))

    def write(self, step: StepReport) -> None:
        """One event with the step's scalars; what a phase did not reach is left out."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars: dict[str, float | None] = {
            "parity/compared_tokens": step.compared_tokens,
            "parity/mismatched_tokens": step.mismatched_tokens,
            "parity/max_abs_diff": step.max_abs_diff,
            "train/reward_mean": step.reward_mean,
            "train/loss": step.loss,
            "train/grad_norm": step.grad_norm,
            "train/entropy": step.entropy,
            **{f"seconds/{phase}": value for phase, value in step.seconds.items()},
        }
        values = [
            Summary.Value(tag=tag, simple_value=value)
            for tag, value in scalars.items()
            if value is not None
        ]
        self._writer.add_event(
            Event(wall_time=time.time(), step=step.step, summary=Summary(value=values))
        )

    def close(self) -> None:
        """Flush what was written."""
        self._writer.close()
