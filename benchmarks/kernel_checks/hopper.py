"""The entries of the Hopper tables: every one gives the bits of the general kernel."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context

import torch

from benchmarks.bitwise import differing, exact_leaves, one_ulp, random, small_integers
from benchmarks.kernel_checks.setting import Setting
from sglang_patch.ops.linear.table import (
    FEW,
    FEW_ROWS,
    PERSISTENT,
    FewTile,
    PersistentTile,
    choose,
    plan_for,
)
from sglang_patch.ops.row_linear import reference as row_linear_reference
from sglang_patch.ops.row_linear.kernel import TILES, launch_row_linear_partial

BF16, FP32 = torch.bfloat16, torch.float32
# (tile, leaves, parts, only the last wave in parts): what `choose` can return, and a little more.
Case = tuple[FewTile | PersistentTile, int, int, bool]
# An eighth of the first is a multiple of 128, of the second of 64 only.
_K_SIZES = (4096, 1536)
_COLUMNS = 648
# Few enough that programs take several units, and that the last wave is incomplete.
_PROCESSORS = (132, 7)


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


def _rows(tile: FewTile | PersistentTile) -> tuple[int, ...]:
    if isinstance(tile, FewTile):
        return (1, 7, FEW_ROWS)
    return (1, 33, 64, 65, 257) if tile.halved else (65, 128, 129, 600)


def compare(case: Case, device: str) -> int:
    """Run one entry over rows, K and processors; returns the number of outputs compared."""
    tile, leaves, parts, mixed = case
    run, compared = min(leaves, 2), 0
    for k_size in _K_SIZES:
        most = max(_rows(tile))
        x = random(most, k_size, seed=41).to(device)
        weight = random(_COLUMNS, k_size, seed=42).to(device)
        exact = exact_leaves(most, k_size, leaves, seed=43)
        integers = small_integers(_COLUMNS, k_size, seed=44)
        general = TILES[-1]
        wanted = launch_row_linear_partial(x, weight, leaves, run, FP32, tile=general)
        written = row_linear_reference.partial(exact[:16], integers, leaves, run, FP32)
        exact, integers = exact.to(device), integers.to(device)
        if leaves > 2:
            plain = launch_row_linear_partial(x, weight, leaves, leaves, FP32, tile=general)
            assert differing(plain, wanted) > 0, f"{case}: the order must show"
        for rows in _rows(tile):
            for processors in _PROCESSORS:
                entry = tile
                if isinstance(tile, PersistentTile):
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
    return compared


def hopper_entries(s: Setting) -> str:
    """Every entry of the tables: general kernel's bits over rows, K, parts, waves and dtypes."""
    assert choose(4, 2560, 4096, 8, 132) is not None and choose(4096, 2560, 4096, 8, 132)
    if s.device == "cpu" or torch.cuda.get_device_capability() != (9, 0):
        return f"not run: no Hopper GPU; {len(entries())} entries"
    # Most of the time is compilation: one process a processor but two.
    workers = max(1, min(14, (os.cpu_count() or 1) - 2))
    with ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        compared = sum(pool.map(compare, entries(), repeat(s.device)))
    assert compared > 0
    return f"{len(entries())} entries, {compared} outputs"
