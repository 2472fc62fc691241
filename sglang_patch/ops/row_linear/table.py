"""Which kernel and which tile contract v1's products take on Hopper: never which bits they give.

As `linear.table`, by arithmetic on the sizes, with the runs of tiles as the leaves of the tree. The
nanoseconds are those fitted there for the same tiles, and an estimate for each tile of K: 64 sums
a thread are rounded and added while the other consumer multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

from ..linear.table import (
    FEW_ROWS,
    FewTile,
    Levels,
    PersistentTile,
    Plan,
    nanoseconds,
    plan_for,
)

# Columns of K in a leaf that the entries take: contract v1's tile.
LEAF_WIDTH: Final = 128
# Levels of the deepest tree of runs.
_DEPTH: Final = 7


@dataclass(frozen=True, slots=True)
class FewPlan:
    """One launch of `kernel_tiles_few`: `parts` subtrees side by side."""

    tile: FewTile
    parts: int


Choice: TypeAlias = FewPlan | Plan


def _levels(block_k: int, stages: int, registers: int) -> tuple[Levels, ...]:
    """The lowest levels wait in registers, those above, which are rarely met, in the workspace."""
    return tuple(
        Levels("R" * min(d, registers) + "W" * max(0, d - registers), block_k, stages)
        for d in range(_DEPTH + 1)
    )


# 227 KB of shared memory and 240 registers a consumer's thread decide the stages and the places.
PERSISTENT: Final = (
    PersistentTile("64x32", True, 16, 0, _levels(128, 8, 3), (1.77, 20, 800), (1.77, 2600)),
    PersistentTile("64x64", True, 32, 0, _levels(128, 6, 3), (2.39, 20, 1080), (2.75, 2500)),
    PersistentTile("64x128", True, 64, 0, _levels(128, 4, 3), (3.3, 40, 1500), (4.6, 4000)),
    PersistentTile("128x64", False, 64, 0, _levels(64, 8, 3), (2.95, 40, 1190), (3.45, 3800)),
    PersistentTile("128x128", False, 128, 0, _levels(64, 6, 2), (5.0, 60, 1330), (5.2, 4800)),
)

# block_k: a leaf is loaded at once. Without parts there are few programs, which each read further
# ahead.
FEW: Final = (
    FewTile(block_n=16, block_k=LEAF_WIDTH, warps=2, stages=5),
    FewTile(block_n=16, block_k=LEAF_WIDTH, warps=2, stages=8),
    FewTile(block_n=32, block_k=LEAF_WIDTH, warps=4, stages=6),
)
_MOST_PARTS: Final = 16


def admitted_parts(tile: PersistentTile) -> tuple[tuple[int, bool], ...]:
    """(parts, mixed) that the table may give a tile; mixed: the last, incomplete wave alone."""
    if tile.columns <= 64:
        return ((1, False), (2, False), (4, False))
    if tile.halved:
        return ((1, False), (2, False))
    return ((1, False), (2, False), (2, True))


def _few(columns: int, runs: int, processors: int) -> FewPlan:
    """At most 16 rows: as many subtrees as give each processor four programs."""
    near, far, wide = FEW
    tile = near if columns <= 4096 else wide
    parts, blocks = 1, -(-columns // tile.block_n)
    while parts < min(runs, _MOST_PARTS) and blocks * parts < 4 * processors:
        parts *= 2
    return FewPlan(far if parts == 1 and columns <= 4096 else tile, parts)


@lru_cache(maxsize=4096)
def choose(rows: int, columns: int, leaves: int, run: int, processors: int) -> Choice | None:
    """The entry for `leaves` tiles of K in runs of `run`; None: the general kernel."""
    runs = leaves // run
    if rows <= FEW_ROWS:
        return _few(columns, runs, processors)
    plans = []
    for tile in PERSISTENT:
        # Beyond these the other kind of tile reads less.
        if rows > 256 if tile.halved else rows <= 64:
            continue
        for parts, mixed in admitted_parts(tile):
            plan = plan_for(tile, rows, columns, LEAF_WIDTH, runs, parts, mixed, processors)
            if plan is None:
                continue
            # Parts fill one wave, or what whole tiles leave of the last one.
            if mixed and not 0 < plan.split < plan.tiles:
                continue
            if parts > 1 and not mixed and plan.units > processors:
                continue
            plans.append(plan)
    k_size = leaves * LEAF_WIDTH
    return min(plans, key=lambda plan: nanoseconds(plan, k_size, leaves, processors), default=None)
