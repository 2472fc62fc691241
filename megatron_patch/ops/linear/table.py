"""Which kernel and which tile a product on Hopper takes: never which bits it gives.

Every entry adds in the same order, so the choice is free, and it is made by arithmetic on the
sizes: nothing is timed at run time. The nanoseconds were fitted to medians on an H200 (driver
580.159, torch 2.11, Triton 3.6; docs/performance.md); on another Hopper GPU they rank as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, TypeAlias

import torch

Staging = Literal["own", "waiting", "x"]

# Rows that `kernel_few` takes: the height of one tensor-core instruction.
FEW_ROWS: Final = 16


@dataclass(frozen=True, slots=True)
class FewTile:
    """Launch constants of `kernel_few`."""

    block_n: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Levels:
    """Where the left halves of a tree wait, a letter a level from the leaves up, and what is left.

    R: registers, S: shared memory, W: an fp32 workspace that stays in the L2 cache. `staging`: the
    output leaves through buffers of its own, over the waiting sums, or over x (one tile a program).
    """

    places: str
    block_k: int
    stages: int
    staging: Staging = "own"


@dataclass(frozen=True, slots=True)
class PersistentTile:
    """A tile of `kernel_persistent`, and the time one takes on one processor.

    halved: two consumers share 64 rows and take half the columns each; otherwise 64 rows each.
    levels: one entry for each depth of tree that fits. Times in nanoseconds: for each k, leaf and
    unit of a whole tile, and for each k and unit of a tile's part, which is also added to others.
    """

    name: str
    halved: bool
    block_n: int
    extra_n: int
    levels: tuple[Levels, ...]
    whole: tuple[float, float, float]
    part: tuple[float, float]

    @property
    def rows(self) -> int:
        return 64 if self.halved else 128

    @property
    def columns(self) -> int:
        return self.block_n * (2 if self.halved else 1) + self.extra_n


@dataclass(frozen=True, slots=True)
class Plan:
    """One launch: `split` of the `tiles` are `parts` units each; the others are one unit."""

    tile: PersistentTile
    levels: Levels
    parts: int
    mixed: bool
    tiles: int
    split: int
    programs: int

    @property
    def units(self) -> int:
        return self.tiles + self.split * (self.parts - 1)


Choice: TypeAlias = FewTile | Plan


def _registers(block_k: int, stages: int, depth: int = 4) -> tuple[Levels, ...]:
    return tuple(Levels("R" * d, block_k, stages) for d in range(depth))


# 227 KB of shared memory and 240 registers a consumer's thread decide the stages and the places.
PERSISTENT: Final = (
    PersistentTile("64x16", True, 8, 0, _registers(128, 10), (1.6, 110, 600), (1.78, 2400)),
    PersistentTile("64x32", True, 16, 0, _registers(128, 8), (1.77, 150, 800), (1.77, 2600)),
    PersistentTile("64x64", True, 32, 0, _registers(128, 6), (2.39, 80, 1080), (2.75, 2500)),
    PersistentTile("64x128", True, 64, 0, _registers(128, 4), (3.3, 80, 1500), (4.6, 4000)),
    PersistentTile("128x64", False, 64, 0, _registers(64, 8), (2.95, 327, 1190), (3.45, 3800)),
    PersistentTile(
        "128x128", False, 128, 0,
        (*_registers(64, 6, 2), Levels("RS", 64, 5, "waiting"), Levels("RSW", 64, 5, "waiting")),
        (5.0, 690, 1330), (5.2, 4800),
    ),
    PersistentTile(
        "128x256", False, 256, 0,
        (Levels("", 64, 4), Levels("S", 32, 4, "waiting")), (9.8, 2900, 1500), (8.9, 9000),
    ),
    PersistentTile(
        "128x320", False, 256, 64, (Levels("", 64, 4, "x"),), (11.6, 0, 1500), (0, 0)
    ),
)  # fmt: skip

FEW: Final = (
    FewTile(block_n=16, block_k=512, warps=2, stages=3),
    FewTile(block_n=32, block_k=128, warps=4, stages=5),
    FewTile(block_n=128, block_k=128, warps=4, stages=4),
    FewTile(block_n=128, block_k=64, warps=4, stages=6),
)


def _few(rows: int, columns: int, leaf_width: int, leaves: int) -> FewTile | None:
    """Measured winners of 16 rows or fewer; None: the persistent kernel is as fast or faster."""
    narrow, middle, wide, widest = FEW
    if leaves == 1:
        if columns > 4096:
            return widest if 16384 <= columns <= 32768 else None
        return narrow if leaf_width >= 1024 else middle
    if leaves == 2:
        if columns > 4096:
            return None
        return narrow if 1024 < columns <= 2560 and leaf_width >= 1024 else middle
    if leaves == 4:
        if columns > 4096 and rows > 8:
            return None
        return middle if columns < 2048 or leaf_width < 1024 else wide
    if columns <= 1024:
        return middle
    return widest if rows <= 8 and columns <= 4096 else None


def plan_for(
    tile: PersistentTile,
    rows: int,
    columns: int,
    leaf_width: int,
    leaves: int,
    parts: int,
    mixed: bool,
    processors: int,
) -> Plan | None:
    """The launch of one entry, or None where it does not fit the sizes.

    mixed: only the tiles of the last, incomplete wave are cut into parts.
    """
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
    depth = (leaves if mixed else leaves // parts).bit_length() - 1
    if parts > leaves or depth >= len(tile.levels):
        return None
    split = 0 if parts == 1 else tiles % processors if mixed else tiles
    levels = tile.levels[depth]
    if levels.block_k == 128 and leaf_width % 128:
        levels = Levels(levels.places, 64, 2 * levels.stages, levels.staging)
    units = tiles + split * (parts - 1)
    if leaf_width % levels.block_k or (levels.staging == "x" and units > processors):
        return None
    if tile.extra_n and (parts > 1 or leaves > 1):
        return None
    return Plan(tile, levels, parts, mixed, tiles, split, min(processors, units))


def nanoseconds(plan: Plan, k_size: int, leaves: int, processors: int) -> float:
    """The estimate by which plans are compared."""
    per_k, per_leaf, per_unit = plan.tile.whole
    part_per_k, per_part = plan.tile.part
    waves = -(-(plan.tiles - plan.split) // processors)
    part_waves = -(-plan.split * plan.parts // processors)
    return waves * (k_size * per_k + leaves * per_leaf + per_unit) + part_waves * (
        (k_size * part_per_k + leaves * per_leaf) / plan.parts + per_part
    )


@lru_cache(maxsize=4096)
def choose(rows: int, columns: int, k_size: int, leaves: int, processors: int) -> Choice | None:
    """The entry for a product of `leaves` equal leaves; None: the general kernel."""
    if rows <= FEW_ROWS:
        few = _few(rows, columns, k_size // leaves, leaves)
        if few is not None:
            return few
    plans = []
    for tile in PERSISTENT:
        # Beyond these the other kind of tile reads less.
        if rows > 256 if tile.halved else rows <= 64:
            continue
        for parts, mixed in ((1, False), (2, False), (2, True), (4, False)):
            plan = plan_for(tile, rows, columns, k_size // leaves, leaves, parts, mixed, processors)
            if plan is None or (parts == 4 and tile.columns > 64):
                continue
            # Parts fill one wave, or what whole tiles of the middle size leave of the last one.
            if mixed and (not 0 < plan.split < plan.tiles or tile.columns != 128 or tile.halved):
                continue
            if parts > 1 and not mixed and (plan.units > processors or tile.columns > 128):
                continue
            plans.append(plan)
    return min(plans, key=lambda plan: nanoseconds(plan, k_size, leaves, processors), default=None)


def admits(x: torch.Tensor, weight: torch.Tensor, out_bytes: int, leaves: int) -> bool:
    """Whether the entries may take this product: a Hopper GPU, rows that its copy engine reads."""
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) != (9, 0):
        return False
    (_, k_size), columns = x.shape, weight.shape[0]
    return (
        leaves in (1, 2, 4, 8)
        and k_size % leaves == 0
        and k_size // leaves % 64 == 0
        and columns * out_bytes % 16 == 0
        and all(
            m.stride(1) == 1 and m.stride(0) % 8 == 0 and m.data_ptr() % 16 == 0
            for m in (x, weight)
        )
    )
