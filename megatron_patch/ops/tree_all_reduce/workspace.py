"""The memory that the ranks of a group share, as one rank sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ..formats import require

# Flags of each rank for each other one; at most so many programs take part in a sum, fewer than
# any supported GPU has processors, so that all of them run at the same time.
PROGRAMS: Final = 128
WORLD_SIZES: Final = (2, 4, 8)
# The largest message, in bytes of a rank, that takes one shot, by world size. One shot sends
# (size - 1) messages a rank, two shots (size - 1) / size of one and of the rounded sums, for one
# more wait: equal where the bytes saved cost as much as the wait (estimated at 3 us, 400 GB/s).
ONE_SHOT_BYTES: Final = {2: 4 << 20, 4: 640 << 10, 8: 224 << 10}
# A rank's stage for large messages: 8192 rows of 5120 in fp32. Larger ones go through it in pieces.
STAGED_BYTES: Final = 160 << 20
_ALIGNED: Final = 1 << 10


@dataclass(frozen=True, slots=True)
class Areas:
    """Offsets in bytes, the same in every rank's buffer of `total` bytes."""

    world: int
    one_shot_bytes: int
    staged_bytes: int

    def __post_init__(self) -> None:
        require(
            self.world in WORLD_SIZES,
            f"tree_all_reduce: world size {self.world}; the ranks' tree is over 1, 2, 4 or 8",
        )
        require(
            self.one_shot_bytes % _ALIGNED == 0 and self.staged_bytes % (8 * _ALIGNED) == 0,
            f"tree_all_reduce: {self.one_shot_bytes} and {self.staged_bytes} bytes are not "
            f"multiples of {_ALIGNED} and {8 * _ALIGNED}",
        )

    @property
    def received(self) -> int:
        """[2, world] messages of `one_shot_bytes`, after the int32 flags [world, PROGRAMS]."""
        return -(-4 * self.world * PROGRAMS // _ALIGNED) * _ALIGNED

    @property
    def staged(self) -> int:
        return self.received + 2 * self.world * self.one_shot_bytes

    @property
    def shared(self) -> int:
        """The rounded sums of this rank's share of the stage, at most as wide as the stage's."""
        return self.staged + self.staged_bytes

    @property
    def total(self) -> int:
        return self.shared + self.staged_bytes // self.world


class Workspace:
    """One rank's view: every rank's buffer, mapped here, and this rank's own epochs.

    buffers: [areas.total] uint8 each, in rank order, flags zero on every rank before anybody's
    first launch; owner: whatever keeps the others mapped. Every rank must call the launchers of
    `kernel.py` in the same order.
    """

    def __init__(
        self, rank: int, areas: Areas, buffers: Sequence[torch.Tensor], owner: object = None
    ) -> None:
        assert len(buffers) == areas.world and 0 <= rank < areas.world, (rank, len(buffers))
        assert all(b.dtype == torch.uint8 and b.numel() == areas.total for b in buffers)
        self.rank, self.areas = rank, areas
        self._buffers, self._owner = tuple(buffers), owner
        self._views: dict[tuple[int, int, torch.dtype], tuple[torch.Tensor, ...]] = {}
        self.flags = self._of(0, 4 * areas.world * PROGRAMS, torch.int32)
        # One epoch a program; equal between launches.
        self.epochs = torch.zeros(PROGRAMS, dtype=torch.int32, device=buffers[rank].device)

    def _of(self, start: int, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        key = (start, length, dtype)
        if key not in self._views:
            self._views[key] = tuple(b[start : start + length].view(dtype) for b in self._buffers)
        return self._views[key]

    def received(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """What each rank received, [2 * world * capacity] in `dtype`."""
        length = 2 * self.areas.world * self.areas.one_shot_bytes
        return self._of(self.areas.received, length, dtype)

    def staged(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Each rank's stage, flat, in `dtype`."""
        return self._of(self.areas.staged, self.areas.staged_bytes, dtype)

    def shared(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Each rank's rounded sums, flat, in `dtype`."""
        return self._of(self.areas.shared, self.areas.staged_bytes // self.areas.world, dtype)
