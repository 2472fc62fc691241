"""The Hopper tables, without a GPU: what they choose, that it fits, and that it compiles."""

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
from sglang_patch.ops.linear.kernel_persistent import (
    operand_layout,
    output_box,
    persistent_kernel,
)
from sglang_patch.ops.linear.table import FewTile, Plan, admits, choose

PROCESSORS = 132
_ROWS = (1, 16, 17, 64, 65, 128, 256, 257, 1000, 2048, 8192, 70000)
# (columns, K of one rank) of Qwen3 0.6B to 32B at TP 1 to 4, and a vocabulary.
_SIZES = (
    (1024, 512), (1024, 3072), (2560, 2432), (2560, 9728), (4096, 4096), (4096, 12288),
    (5120, 2048), (5120, 25600), (19456, 2560), (151936, 2560),
)  # fmt: skip
_SHARED_MEMORY = 227 * 1024


def _plan(rows: int, columns: int, k_size: int, leaves: int) -> Plan:
    plan = choose(rows, columns, k_size, leaves, PROCESSORS)
    assert isinstance(plan, Plan), plan
    return plan


@pytest.mark.parametrize("rows", _ROWS)
@pytest.mark.parametrize("leaves", [1, 2, 4, 8])
def test_every_size_has_an_entry_that_covers_it(rows: int, leaves: int) -> None:
    for columns, k_size in _SIZES:
        if k_size // leaves % 64:
            continue
        entry = choose(rows, columns, k_size, leaves, PROCESSORS)
        assert entry is not None
        if isinstance(entry, FewTile):
            assert rows <= 16
            continue
        tile = entry.tile
        assert entry.tiles == -(-rows // tile.rows) * -(-columns // tile.columns)
        assert entry.units == entry.tiles - entry.split + entry.split * entry.parts
        assert 1 <= entry.programs <= min(PROCESSORS, entry.units)
        local = leaves if entry.mixed else leaves // entry.parts
        assert leaves % entry.parts == 0 and len(entry.levels.places) == local.bit_length() - 1
        assert k_size // leaves % entry.levels.block_k == 0
        if entry.levels.staging == "x":
            assert entry.units <= PROCESSORS, "x is staging only where no second tile follows"


def test_no_entry_takes_a_leaf_that_its_steps_do_not_divide() -> None:
    for rows in (64, 2048):
        assert choose(rows, 2560, 8 * 40, 8, PROCESSORS) is None


def test_only_a_hopper_gpu_is_admitted() -> None:
    x, weight = (torch.zeros(n, 128, dtype=torch.bfloat16) for n in (4, 64))
    assert not admits(x, weight, 4, 1)


def _compiled(plan: Plan, leaves: int, out: str) -> Any:
    tile, levels = plan.tile, plan.levels
    layout = operand_layout(levels.block_k)
    width, out_layout = output_box(tile.block_n, 16 if out == "bf16" else 32)
    weight_rows = tile.columns - tile.extra_n

    def blocks(kind: str, rows: int, columns: int, block: gl.NVMMASharedLayout) -> str:
        return f"tensordesc<{kind}{[rows, columns]},{block!r}>"

    types = {
        "x": blocks("bf16", tile.rows, levels.block_k, layout),
        "weight": blocks("bf16", weight_rows, levels.block_k, layout),
        "extra": blocks("bf16", tile.extra_n or weight_rows, levels.block_k, layout),
        "out": blocks(out, 64, width, out_layout),
        "workspace": "*fp32",
        "parts": "*fp32",
        "arrivals": "*i32",
        **dict.fromkeys(("units", "whole", "steps", "blocks_m", "blocks_n"), "i32"),
    }
    constants = {
        "STAGES": levels.stages,
        "BLOCK_N": tile.block_n,
        "EXTRA_N": tile.extra_n,
        "LEAVES": leaves,
        "PLACES": levels.places,
        "STAGING": levels.staging,
        "PARTS": plan.parts,
        "MIXED": plan.mixed,
        "COLUMNS": tile.columns,
        "num_warps": 4,
    }
    names = persistent_kernel.arg_names
    source = GluonASTSource(
        persistent_kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in ("workspace", "parts", "arrivals")},
    )
    return compile_kernel(
        source, target=HOPPER, options={"num_warps": 4, "maxnreg": 168, **UNFUSED}
    )


@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("rows", "columns", "k_size", "leaves"),
    [
        (64, 1024, 2048, 1),
        (64, 2560, 4096, 4),
        (64, 2560, 9728, 8),
        (256, 2560, 4096, 8),
        (2048, 2560, 4096, 1),
        (2048, 2560, 4096, 2),
        (2048, 2560, 4096, 8),
        (8192, 2560, 9728, 1),
        (8192, 4096, 4096, 4),
    ],
)
def test_entries_compile_within_the_processor(
    rows: int,
    columns: int,
    k_size: int,
    leaves: int,
    out: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    plan = _plan(rows, columns, k_size, leaves)
    built = _compiled(plan, leaves, out)
    assert built.metadata.shared <= _SHARED_MEMORY, plan
    ptx = built.asm["ptx"]
    wide = f"m64n{plan.tile.block_n}k16.f32.bf16.bf16"
    assert re.search(rf"wgmma\.mma_async\.sync\.aligned\.{re.escape(wide)}", ptx), plan
    assert "tf32" not in ptx and "fma.rn.f32" not in ptx and ".local" not in ptx
    assert ("atom" in ptx) == (plan.parts > 1), plan
