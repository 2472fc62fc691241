"""Contract v1's Hopper tables, without a GPU: what they choose, that it fits, that it compiles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ahead_of_time import HOPPER
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from sglang_patch.ops.elementary_kernel import UNFUSED
from sglang_patch.ops.linear.kernel_persistent import operand_layout, output_box
from sglang_patch.ops.linear.table import Levels, PersistentTile, Plan, plan_for
from sglang_patch.ops.row_linear.kernel import launch_row_linear_partial
from sglang_patch.ops.row_linear.kernel_tiles import tiles_kernel
from sglang_patch.ops.row_linear.table import (
    LEAF_WIDTH,
    PERSISTENT,
    FewPlan,
    admitted_parts,
    choose,
)
from sglang_patch.schema.reduction import run_length

PROCESSORS = 132
_ROWS = (1, 16, 17, 64, 65, 128, 256, 257, 1000, 2048, 8192, 70000)
_TILES = (2, 3, 4, 6, 7, 8, 12, 16, 19, 24, 32, 37, 38, 40, 48, 64, 76, 96, 100, 148, 200, 256)
_COLUMNS = (1024, 2560, 4096, 5120)
_SHARED_MEMORY = 227 * 1024


def test_every_size_has_an_entry_that_covers_it() -> None:
    for tiles in _TILES:
        run = run_length(tiles)
        for rows in _ROWS:
            for columns in _COLUMNS:
                entry = choose(rows, columns, tiles, run, PROCESSORS)
                assert entry is not None, (rows, columns, tiles)
                runs = tiles // run
                if isinstance(entry, FewPlan):
                    assert rows <= 16 and runs % entry.parts == 0
                    continue
                tile = entry.tile
                assert entry.tiles == -(-rows // tile.rows) * -(-columns // tile.columns)
                assert 1 <= entry.programs <= min(PROCESSORS, entry.units)
                local = runs if entry.mixed else runs // entry.parts
                assert runs % entry.parts == 0, "a part is a whole subtree"
                assert len(entry.levels.places) == local.bit_length() - 1
                assert entry.levels.places.count("R") <= 3, "slots that may be registers"
                assert LEAF_WIDTH % entry.levels.block_k == 0


def test_a_run_is_never_cut() -> None:
    for tile in PERSISTENT:
        for parts, mixed in admitted_parts(tile):
            if parts > 1:
                assert plan_for(tile, 512, 2560, LEAF_WIDTH, 1, parts, mixed, PROCESSORS) is None


def test_a_tree_too_deep_or_another_width_has_no_entry() -> None:
    assert choose(2048, 2560, 1024, 2, PROCESSORS) is None
    x, weight = (torch.zeros(n, 192, dtype=torch.bfloat16) for n in (4, 64))
    with pytest.raises(ValueError, match="power of two of runs"):
        launch_row_linear_partial(x, weight, 3, 2, torch.bfloat16)


def _compiled(tile: PersistentTile, levels: Levels, plan: Plan, tiles: int) -> Any:
    layout = operand_layout(levels.block_k)
    width, out_layout = output_box(tile.block_n, 16)

    def blocks(rows: int, columns: int, block: gl.NVMMASharedLayout) -> str:
        return f"tensordesc<bf16{[rows, columns]},{block!r}>"

    types = {
        "x": blocks(tile.rows, levels.block_k, layout),
        "weight": blocks(tile.columns, levels.block_k, layout),
        "out": blocks(64, width, out_layout),
        **dict.fromkeys(("workspace", "parts", "arrivals"), "*i32"),
        **dict.fromkeys(("units", "whole", "steps", "blocks_m", "blocks_n"), "i32"),
    }
    constants = {
        "STAGES": levels.stages,
        "STEPS": LEAF_WIDTH // levels.block_k,
        "BLOCK_N": tile.block_n,
        "LEAVES": tiles,
        "RUN": run_length(tiles),
        "PLACES": levels.places,
        "PARTS": plan.parts,
        "MIXED": plan.mixed,
        "COLUMNS": tile.columns,
        "num_warps": 4,
    }
    names = tiles_kernel.arg_names
    source = GluonASTSource(
        tiles_kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in ("workspace", "parts", "arrivals")},
    )
    return compile_kernel(
        source, target=HOPPER, options={"num_warps": 4, "maxnreg": 168, **UNFUSED}
    )


@pytest.mark.parametrize("number", range(len(PERSISTENT)))
@pytest.mark.parametrize(("tiles", "parts"), [(38, 1), (32, 2)])
def test_entries_compile_within_the_processor(
    number: int, tiles: int, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tile, runs = PERSISTENT[number], tiles // run_length(tiles)
    plan = plan_for(tile, 300, 640, LEAF_WIDTH, runs, parts, False, PROCESSORS)
    assert plan is not None
    built = _compiled(tile, plan.levels, plan, tiles)
    assert built.metadata.shared <= _SHARED_MEMORY, plan
    ptx = built.asm["ptx"]
    wide = f"m64n{tile.block_n}k16.f32.bf16.bf16"
    assert re.search(rf"wgmma\.mma_async\.sync\.aligned\.{re.escape(wide)}", ptx), plan
    # Each leaf is rounded once and each sum is one bf16 sum: nothing is added in fp32.
    assert "cvt.rn.bf16x2.f32" in ptx and "add.rn.bf16x2" in ptx
    assert not re.search(r"\b(add|fma)(\.rn)?\.f32\b", ptx) and "tf32" not in ptx
    assert ".local" not in ptx and ("atom" in ptx) == (parts > 1), plan
