"""The attention kernels compiled for real GPUs, here without one: what sets their bits."""

from __future__ import annotations

from typing import Any

import pytest
from ahead_of_time import AMPERE, HOPPER, compile_ptx, instructions

from sglang_patch.ops.attention import kernel_triton
from sglang_patch.ops.attention.blocks import BLOCK_KEYS, CHUNK_BLOCKS
from sglang_patch.ops.elementary_kernel import UNFUSED

TARGETS = {"sm80": AMPERE, "sm90": HOPPER}
SHAPE = {"BLOCK": BLOCK_KEYS, "CHUNK": CHUNK_BLOCKS}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


def ptx(name: str, constants: dict[str, Any], target: Any = HOPPER, warps: int = 4) -> str:
    kernel = getattr(kernel_triton, name)
    pointers = dict.fromkeys(("query_ptr", "key_ptr", "value_ptr", "out_ptr"), "*bf16")
    pointers |= dict.fromkeys(("parts_ptr", "sums_ptr", "lse_ptr"), "*fp32")
    pointers |= {"key_lengths_ptr": "*i64", "requests_ptr": "*i64", "log2_scale": "fp32"}
    names = [n for n in kernel.arg_names if n not in constants]
    types = {n: pointers.get(n, "*i32" if n.endswith("_ptr") else "i32") for n in names}
    options = {"num_warps": warps, "num_stages": 2, **UNFUSED}
    return compile_ptx(kernel, types, {**constants, **SHAPE}, target, **options)


PAGED = {"PAGED": True, "key_starts_ptr": None}
PACKED = {"PAGED": False, "key_lengths_ptr": None, "table_ptr": None, "requests_ptr": None}


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("keys", [PAGED, PACKED], ids=["paged", "packed"])
def test_the_steps_that_set_bits(target: str, head_dim: int, keys: dict[str, Any]) -> None:
    width = {"HEAD_DIM": head_dim, "COLUMNS": head_dim, "GROUP": 4}
    prefill = {"ROWS": 64, "ONE_QUERY": False, "WITH_LSE": keys is PACKED, **width, **keys}
    decode = {"ROWS": 16, **width, **keys}
    for name, constants in (("attention_kernel", prefill), ("chunk_kernel", decode)):
        used = instructions(ptx(name, constants, TARGETS[target]))
        assert any("mma" in i and ".f32.bf16.bf16" in i for i in used)
        # The fused steps are written as such; a mere add beside them is still one.
        assert {"fma.rn.f32", "mul.f32"} <= used or {"fma.rn.f32", "mul.rn.f32"} <= used, used
        assert not any("tf32" in i or i.startswith(("red.", "atom")) for i in used)


def test_the_combination_of_a_decode_step_compiles() -> None:
    constants = {"HEAD_DIM": 96, "COLUMNS": 128, "WITH_LSE": True, **PACKED}
    del constants["table_ptr"], constants["requests_ptr"]
    assert "div.rn.f32" in instructions(ptx("combine_kernel", constants, warps=1))


def test_a_launch_specialised_on_ones_compiles() -> None:
    """Triton makes an integer argument of 1 a constant: heads of one, a cache of one."""
    names = kernel_triton.attention_kernel.arg_names
    ones = {n: 1 for n in names if n.endswith("_stride") and n != "table_stride"}
    constants = {"ROWS": 16, "ONE_QUERY": True, "WITH_LSE": False, "GROUP": 1, "HEAD_DIM": 16}
    constants |= {"COLUMNS": 16, "query_starts_ptr": None, "lse_ptr": None, **PAGED}
    assert ptx("attention_kernel", {**constants, **ones})


@pytest.mark.parametrize("shared", [101376, 166912, 232448])
@pytest.mark.parametrize("columns", [16, 64, 128, 256])
def test_a_tile_fits_the_gpu(columns: int, shared: int) -> None:
    """RTX 3090 and 4090, A100, H200."""
    for rows in (1, 16, 17, 64, 65, 8192):
        tile = kernel_triton.choose_tile(rows, columns, shared)
        assert 2 * columns * (tile.rows + 2 * tile.stages * BLOCK_KEYS) <= shared
        assert tile.stages >= 2 or columns == 256
    tallest = kernel_triton.choose_tile(8192, columns, shared).rows
    assert tallest == {128: 128, 256: 16 if shared == 101376 else 64}.get(columns, 64)


def test_a_gpu_without_room_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="256 columns of head_dim need .* processors have 65536"):
        kernel_triton.choose_tile(64, 256, 65536)
