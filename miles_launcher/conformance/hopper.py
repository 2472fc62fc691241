"""The entries of the Hopper tables: each one gives the general kernel's bits. Imports Triton."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from sglang_patch.ops.linear.table import (
    FEW,
    FEW_ROWS,
    PERSISTENT,
    FewTile,
    PersistentTile,
    Plan,
    plan_for,
)
from sglang_patch.ops.row_linear.kernel import TILES, launch_row_linear_partial

from .bits import differing, exact_leaves, one_ulp, random, small_integers
from .context import array
from .oracle import products

BF16, FP32 = torch.bfloat16, torch.float32
# (tile, leaves, parts, only the last wave in parts): what the table can choose, and a little more.
Case = tuple[FewTile | PersistentTile, int, int, bool]
# An eighth of the first is a multiple of 128, of the second of 64 only.
_K_SIZES = (4096, 1536)
_COLUMNS = 648
# Few enough that programs take several units, and that the last wave is incomplete.
_PROCESSORS = (132, 7)


def is_hopper() -> bool:
    """Whether the tables serve the GPU present."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def entries() -> list[Case]:
    """Every entry of the tables with every number of leaves and parts that it takes."""
    cases: list[Case] = [(tile, leaves, leaves, False) for tile in FEW for leaves in (1, 2, 4, 8)]
    for tile in PERSISTENT:
        for leaves in (1, 2, 4, 8):
            for parts, mixed in ((1, False), (2, False), (2, True), (4, False)):
                if parts == 4 and tile.columns > 64:
                    continue
                if plan_for(tile, 128, 64, 64, leaves, parts, mixed, 132) is not None:
                    cases.append((tile, leaves, parts, mixed))
    return cases


def splits(case: Case) -> bool:
    """Whether the entry gives parts of one product's K to several programs."""
    return case[2] > 1


def _rows(tile: FewTile | PersistentTile) -> tuple[int, ...]:
    if isinstance(tile, FewTile):
        return (1, 7, FEW_ROWS)
    return (1, 33, 64, 65, 257) if tile.halved else (65, 128, 129, 600)


def compare(case: Case) -> int:
    """Run one entry over rows, K and processors: on random numbers against the general kernel, on
    exact leaves against the oracle's order. Returns how many outputs were compared.

    Raises `AssertionError` naming the entry where a bit differs, or where inputs show nothing.
    """
    tile, leaves, parts, mixed = case
    run, compared = min(leaves, 2), 0
    for k_size in _K_SIZES:
        most = max(_rows(tile))
        x = random(most, k_size, seed=41).cuda()
        weight = random(_COLUMNS, k_size, seed=42).cuda()
        exact = exact_leaves(most, k_size, leaves, seed=43)
        integers = small_integers(_COLUMNS, k_size, seed=44)
        general = TILES[-1]
        wanted = launch_row_linear_partial(x, weight, leaves, run, FP32, tile=general)
        sums = products.leaves(array(exact[:16]), array(integers), leaves)
        written = torch.from_numpy(products.tree(sums, "float32"))
        exact, integers = exact.cuda(), integers.cuda()
        if leaves > 2:
            plain = launch_row_linear_partial(x, weight, leaves, leaves, FP32, tile=general)
            assert differing(plain, wanted) > 0, f"{case}: the order must show"
        for rows in _rows(tile):
            for processors in _PROCESSORS:
                entry: FewTile | Plan
                if isinstance(tile, FewTile):
                    entry = tile
                else:
                    plan = plan_for(
                        tile, rows, _COLUMNS, k_size // leaves, leaves, parts, mixed, processors
                    )
                    if plan is None:
                        continue
                    entry = plan
                for dtype in (FP32, BF16) if k_size == _K_SIZES[0] else (FP32,):
                    label = f"{case}: {rows} rows, K {k_size}, {processors} processors, {dtype}"
                    found = launch_row_linear_partial(
                        x[:rows], weight, leaves, run, FP32, tile=entry, out_dtype=dtype
                    )
                    assert differing(found, wanted[:rows].to(dtype)) == 0, label
                    assert differing(one_ulp(found), wanted[:rows].to(dtype)) == 1, label
                    compared += 1
                # Again: the counters are back at zero. Exact leaves: the order that is written.
                found = launch_row_linear_partial(
                    exact[:rows], integers, leaves, run, FP32, tile=entry
                )
                short = min(rows, 16)
                assert differing(found[:short].cpu(), written[:short]) == 0, f"{case}: {rows}"
    assert compared > 0, f"{case}: fits none of the sizes"
    return compared


def over_processes(compare_one: Callable[[Any], int], chosen: list[Any]) -> int:
    """The sum of `compare_one` over `chosen`."""
    # Most of the time is compilation: one process a processor but two.
    workers = max(1, min(14, (os.cpu_count() or 1) - 2))
    with ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        return sum(pool.map(compare_one, chosen))


def compare_all(chosen: list[Case]) -> int:
    """`compare` for every entry; returns the outputs compared."""
    return over_processes(compare, chosen)
