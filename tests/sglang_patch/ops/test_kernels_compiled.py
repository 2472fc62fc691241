"""The kernels compiled for real GPUs, here without one: that they compile, and which instructions
decide their bits."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import triton.language as tl
from ahead_of_time import AMPERE, HOPPER, compile_ptx, instructions

from sglang_patch.ops.elementary_kernel import UNFUSED
from sglang_patch.ops.linear.kernel import BLOCK_K, GROUP
from sglang_patch.ops.linear.kernel import TILES as LINEAR_TILES
from sglang_patch.ops.row_linear.kernel import TILES as ROW_TILES

TARGETS = {"sm80": AMPERE, "sm90": HOPPER}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


def kernel(op: str, name: str) -> Any:
    """The jitted function; the package's attribute of that name is the public op."""
    return getattr(importlib.import_module(f"sglang_patch.ops.{op}.kernel"), name)


def _integers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


EXACT: dict[str, tuple[str, str, dict[str, str], dict[str, Any]]] = {
    f"rms_norm-{hidden}-{chunks}": (
        "rms_norm",
        "rms_norm_kernel",
        {
            "x_ptr": "*bf16",
            "weight_ptr": "*fp32",
            "residual_ptr": "*fp32",
            "out_ptr": "*bf16",
            "stream_ptr": "*fp32",
            "eps": "fp32",
            **_integers("rows", "x_stride", "residual_stride"),
        },
        {"HIDDEN": hidden, "HAS_RESIDUAL": True, "ROWS": rows, "COLUMNS": 1 << levels}
        | {"LEVELS": levels, "CHUNKS": chunks, "CHUNK_LEVELS": (chunks - 1).bit_length()},
    )
    for hidden, rows, levels, chunks in ((128, 16, 7, 1), (2560, 1, 11, 2), (2560, 1, 8, 10))
}
EXACT["qk_norm_rope"] = (
    "qk_norm_rope",
    "qk_norm_rope_kernel",
    {
        **dict.fromkeys(("query_ptr", "key_ptr", "query_out_ptr", "key_out_ptr"), "*bf16"),
        **dict.fromkeys(("query_weight_ptr", "key_weight_ptr"), "*fp32"),
        "positions_ptr": "*i64",
        "table_ptr": "*fp32",
        "eps": "fp32",
        **_integers("query_token_stride", "query_group_stride", "query_head_stride"),
        **_integers("key_token_stride", "key_head_stride", "positions_stride"),
    },
    {"QUERY_HEADS": 32, "PER_GROUP": 4, "KEY_HEADS": 8, "QUERY_ROWS": 16, "KEY_ROWS": 8}
    | {"HALF": 64, "LEVELS": 6, "TOGETHER": True},
)
EXACT["rope"] = (
    "rope",
    "rope_kernel",
    {
        **dict.fromkeys(("query_ptr", "key_ptr", "query_out_ptr", "key_out_ptr"), "*bf16"),
        "positions_ptr": "*i64",
        "table_ptr": "*fp32",
        **_integers("query_heads", "key_heads", "positions_stride", "table_stride"),
        **_integers("query_token_stride", "query_head_stride", "query_dim_stride"),
        **_integers("key_token_stride", "key_head_stride", "key_dim_stride"),
    },
    {"HALF": 64, "HEADS": 8, "COLUMNS": 64},
)
EXACT["silu_mul"] = (
    "silu_mul",
    "silu_mul_kernel",
    {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", **_integers("rows", "width", "row_stride")},
    {"ROWS": 1, "COLUMNS": 1024, "EVEN": True},
)
_STATISTICS = ("largest_ptr", "total_ptr", "chosen_ptr", "weighted_ptr")
for _name, _temperature in (("segment_statistics", None), ("token_statistics", "*fp32")):
    EXACT[_name] = (
        "log_softmax",
        "segment_statistics_kernel",
        {
            **dict.fromkeys(("logits_ptr", *_STATISTICS), "*fp32"),
            **({} if _temperature is None else {"temperature_ptr": _temperature}),
            "targets_ptr": "*i64",
            **_integers("real_columns", "width", "first_column", "row_stride", "column_stride"),
            **_integers("temperature_stride"),
        },
        {"GROUPS": 32, "LANES": 128, "LANE_LEVELS": 7, "BLOCKS": 8, "BLOCK_LEVELS": 8}
        | {"HAS_TARGETS": True, "ENTROPY": True, "ALIGNED": True}
        | ({"temperature_ptr": None} if _temperature is None else {}),
    )
EXACT["combine_segments"] = (
    "log_softmax",
    "combine_segments_kernel",
    {**dict.fromkeys((*_STATISTICS[:2], "weighted_ptr", "out_ptr"), "*fp32"), "rows": "i32"},
    {"SEGMENTS": 8, "ROWS": 16, "COLUMNS": 8, "LEVELS": 3},
)
EXACT["log_softmax"] = (
    "log_softmax",
    "log_softmax_kernel",
    {
        **dict.fromkeys(("logits_ptr", "temperature_ptr", *_STATISTICS[:2], "out_ptr"), "*fp32"),
        **_integers("rows", "columns", "row_stride", "column_stride", "temperature_stride"),
    },
    {"SEGMENTS": 8, "SLOTS": 8, "LEVELS": 3, "COLUMNS": 2048},
)
EXACT["logits_gradient"] = (
    "logits_gradient",
    "logits_gradient_kernel",
    {
        **dict.fromkeys(("logits_ptr", "temperature_ptr", "normaliser_ptr"), "*fp32"),
        "gradient_ptr": "*fp32",
        "targets_ptr": "*i64",
        "out_ptr": "*bf16",
        **_integers("columns", "first_column", "real_columns", "row_stride", "temperature_stride"),
    },
    {"COLUMNS": 2048},
)


@pytest.mark.parametrize("case", list(EXACT))
@pytest.mark.parametrize("target", list(TARGETS))
def test_exact_kernels_round_every_operation(case: str, target: str) -> None:
    op, name, types, constants = EXACT[case]
    ptx = compile_ptx(kernel(op, name), types, constants, TARGETS[target], **UNFUSED)
    used = instructions(ptx)
    # `mul.f32` without `.rn` may be fused into an add by the assembler, `mul.rn.f32` may not.
    # The fused ones of the sigmoid are written: an exact product, and an exact remainder.
    written = {"fma.rn.f32", "rcp.approx.ftz.f32"} if case == "silu_mul" else set()
    if written:
        elements = constants["ROWS"] * constants["COLUMNS"] // (32 * 4)
        assert {ptx.count(i) for i in written} == {3 * elements, elements}
    used -= written
    inexact = {i for i in used if i.startswith(("fma.", "ex2.", "lg2.", "rcp.", "rsqrt."))}
    inexact |= used & {"mul.f32", "add.f32", "sub.f32", "div.full.f32", "sqrt.approx.f32"}
    inexact |= {i for i in used if ".ftz" in i or ".approx" in i}
    assert not inexact
    assert "mul.rn.f32" in used
    if case.startswith(("rms_norm", "qk_norm")):
        assert {"div.rn.f32", "sqrt.rn.f32"} <= used


def test_without_the_launch_option_multiplies_are_fused() -> None:
    op, name, types, constants = EXACT["rope"]
    used = instructions(compile_ptx(kernel(op, name), types, constants, HOPPER))
    assert "fma.rn.f32" in used, "the check above would see a fused multiply-add"


@pytest.mark.parametrize("target", list(TARGETS))
def test_products_use_the_tensor_core_with_fp32_accumulators(target: str) -> None:
    types = {
        **dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr"), "*bf16"),
        "out_ptr": "*fp32",
        **_integers("rows", "columns", "k_size", "x_row_stride", "weight_row_stride"),
    }
    common = {"x_k_stride": 1, "weight_k_stride": 1, "BLOCK_K": BLOCK_K, "GROUP": GROUP}
    for tile in LINEAR_TILES:
        constants = {
            "HAS_BIAS": True,
            "EVEN_K": False,
            **common,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
        }
        linear = kernel("linear", "linear_kernel")
        options = {"num_warps": tile.warps, "num_stages": tile.stages, **UNFUSED}
        ptx = compile_ptx(linear, types, constants, TARGETS[target], **options)
        assert any("mma" in i and ".f32.bf16.bf16" in i for i in instructions(ptx)), tile
    del types["bias_ptr"], types["k_size"]
    for tile in ROW_TILES:
        for out, width, run, levels in (("*fp32", 1216, 2, 2), ("*bf16", 128, 19, 2)):
            constants = {
                "LEAF_WIDTH": width,
                "RUN": run,
                "LEVELS": levels,
                "LEAF": tl.bfloat16 if out == "*bf16" else tl.float32,
                **common,
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
            }
            row_linear = kernel("row_linear", "row_linear_kernel")
            options = {"num_warps": tile.warps, "num_stages": tile.stages, **UNFUSED}
            kinds = {**types, "out_ptr": out}
            ptx = compile_ptx(row_linear, kinds, constants, TARGETS[target], **options)
            used = instructions(ptx)
            assert any("mma" in i and ".f32.bf16.bf16" in i for i in used), tile
            assert "fma.rn.f32" not in used, tile
            assert not any("tf32" in i for i in used), tile


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("target", list(TARGETS))
def test_sums_over_ranks_order_what_ranks_see(target: str, world: int) -> None:
    """Arrivals release and acquire over the whole system; nothing is fused."""
    tuples = dict.fromkeys(("received", "staged", "parts"), ("*fp32",) * world)
    tuples |= {"shared": ("*bf16",) * world, "flags": ("*i32",) * world}
    pointers = {"x_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16", "epochs_ptr": "*i32"}
    constants = {"RANK": 1, "WORLD": world, "COUNT": world, "SPAN": 1, "CAPACITY": 1 << 20}
    constants |= {"GATHER": True, "PROGRAMS": 128, "BLOCK": 512}
    for name in ("one_shot_kernel", "two_shot_kernel", "combine_kernel"):
        function = kernel("tree_all_reduce", name)
        names = set(function.arg_names)
        types = {n: t for n, t in {**tuples, **pointers}.items() if n in names}
        types |= {n: "i32" for n in ("numel", "share", "columns", "polls") if n in names}
        chosen = {n: v for n, v in constants.items() if n in names}
        ptx = compile_ptx(function, types, chosen, TARGETS[target], **UNFUSED)
        used = instructions(ptx)
        assert "fma.rn.f32" not in used and "add.f32" not in used
        assert "add.rn.f32" in used
        waits = name != "combine_kernel"
        assert ("atom.global.sys.release.exch.b32" in used) == waits
        assert ("atom.global.sys.acquire.add.u32" in used) == waits
        assert ("trap;" in ptx) == waits


@pytest.mark.parametrize("case", list(EXACT))
def test_a_launch_specialised_on_ones_compiles(case: str) -> None:
    """Triton makes an integer argument of 1 a constant: one row, one head, one column."""
    op, name, types, constants = EXACT[case]
    ones = {n: 1 for n, kind in types.items() if kind == "i32"}
    kept = {n: kind for n, kind in types.items() if n not in ones}
    assert compile_ptx(kernel(op, name), kept, {**constants, **ones}, HOPPER, **UNFUSED)


def test_products_of_one_row_compile() -> None:
    tile = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": BLOCK_K, "GROUP": GROUP}
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16")
    strides = ("x_row_stride", "x_k_stride", "weight_row_stride", "weight_k_stride")
    ones = dict.fromkeys(("rows", "columns", *strides), 1)
    for op, extra in (
        ("linear", {"k_size": 1, "bias_ptr": None, "HAS_BIAS": False, "EVEN_K": False}),
        ("row_linear", {"LEAF_WIDTH": 1, "RUN": 1, "LEVELS": 0, "LEAF": tl.bfloat16}),
    ):
        function = kernel(op, f"{op}_kernel")
        assert compile_ptx(function, pointers, {**tile, **ones, **extra}, HOPPER, **UNFUSED)
