"""The Triton kernels against the reference, bit for bit, in Triton's interpreter.

Not collected by name: `test_kernels_interpreted.py` runs this file with TRITON_INTERPRET=1. What a
GPU is asked runs there too: `tests/conformance/interpreted_suite.py`.
"""

from __future__ import annotations

import os

import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_kernels_interpreted.py"

import bf16_interpreter

from miles_launcher.conformance.bits import differing, exact_leaves, one_ulp, random, small_integers
from sglang_patch.ops import elementary
from sglang_patch.ops.attention.kernel import launch_attention
from sglang_patch.ops.linear import reference as linear_reference
from sglang_patch.ops.linear.kernel import GemmTile, launch_linear
from sglang_patch.ops.linear.kernel_few import few_kernel
from sglang_patch.ops.log_softmax import reference as log_softmax_reference
from sglang_patch.ops.log_softmax.kernel import (
    launch_combine_segments,
    launch_log_softmax,
    launch_statistics,
)
from sglang_patch.ops.logits_gradient.kernel import launch_logits_gradient
from sglang_patch.ops.rms_norm.kernel import launch_rms_norm
from sglang_patch.ops.rope import reference as rope_reference
from sglang_patch.ops.rope.kernel import launch_rope
from sglang_patch.ops.rope.op import rope_table
from sglang_patch.ops.row_linear import reference as row_linear_reference
from sglang_patch.ops.row_linear.kernel import launch_row_linear_partial
from sglang_patch.ops.row_linear.kernel_tiles_few import tiles_few_kernel
from sglang_patch.ops.silu_mul.kernel import launch_silu_mul
from sglang_patch.ops.tree_all_reduce.kernel import launch_combine, launch_one_shot
from sglang_patch.ops.tree_all_reduce.reference import combine, evaluate
from sglang_patch.ops.tree_all_reduce.workspace import Areas, Workspace
from sglang_patch.schema.reduction import balanced, run_length
from sglang_patch.schema.vocabulary import vocabulary_segments

bf16_interpreter.install()
BF16, FP32 = torch.bfloat16, torch.float32
TILE = GemmTile(rows=0, block_m=16, block_n=16, warps=4, stages=1)
TILE_NUMBERS = (1, 2, 3, 6, 7, 19, 24, 37, 38, 76)


def test_rope_at_odd_head_sizes() -> None:
    table = rope_table(48, 5000, 1e6)
    positions = torch.tensor([0, 4096, 4999], dtype=torch.int32)
    query, key = random(3, 2, 48, seed=7), random(3, 1, 48, seed=8)
    out = launch_rope(query, key, positions, table)
    expected = rope_reference.rope(query, key, positions, table)
    assert differing(out[0], expected[0]) == 0 and differing(out[1], expected[1]) == 0


# --- log-softmax ------------------------------------------------------------------------------


def test_a_full_vocabulary_needs_several_blocks() -> None:
    segments = vocabulary_segments("qwen3_dense_true_on_policy_v2", 151936)
    assert segments.width == 19008
    logits = random(1, segments.padded_size, seed=9, dtype=FP32, scale=3.0)
    logits[:, 151936:] = 1e4  # padding must not enter
    real = [segments.real_columns(i) for i in range(8)]
    found = launch_statistics(logits, None, None, 0, segments.width, 8, real)[:2]
    expected = log_softmax_reference.segment_statistics(logits, segments.width, 8, real)
    assert differing(found[0], expected[0]) == 0 and differing(found[1], expected[1]) == 0
    exact = torch.logsumexp(logits[:, :151936].double(), -1)
    assert (launch_combine_segments(*found).double() - exact).abs().max() < 1e-5


def test_logits_through_strides_and_odd_widths() -> None:
    """Rows that no 16-byte load may read: an odd row stride, an odd real width, other columns."""
    temperature = torch.tensor([[0.7], [1.0], [1.3]])
    for logits, real in (
        (random(3, 4100, seed=40, dtype=FP32)[:, 1:4098], 4097),
        (random(3, 4099, seed=41, dtype=FP32), 4099),
        (random(4100, 3, seed=42, dtype=FP32).t(), 4100),
        (random(3, 4100, seed=43)[:, :4100], 4098),
    ):
        found = launch_statistics(logits, temperature, None, 0, 4100, 1, [real])
        expected = log_softmax_reference.segment_statistics(logits, 4100, 1, [real], temperature)
        assert differing(found[0], expected[0]) == 0 and differing(found[1], expected[1]) == 0
        rows = launch_log_softmax(logits, temperature, *found[:2], real)
        there = log_softmax_reference.log_softmax(logits, temperature, *expected, real)
        assert differing(rows, there) == 0


def test_one_segment_over_the_whole_vocabulary() -> None:
    logits = random(3, 9000, seed=10, dtype=FP32)
    largest, total = launch_statistics(logits, None, None, 0, 8999, 1, [8999])[:2]
    expected = log_softmax_reference.segment_statistics(logits, 8999, 1, [8999])
    assert differing(largest, expected[0]) == 0 and differing(total, expected[1]) == 0
    shifted = elementary.exp(logits[:, :8999] - largest)
    assert differing(total[:, 0], shifted.cumsum(-1)[:, -1]) > 0, "a running sum is another number"


# --- products ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 16, 63, 64, 65, 127, 128, 129, 255, 256, 257])
def test_linear_rows_at_tile_borders(rows: int) -> None:
    x, weight = random(257, 70, seed=11), random(20, 70, seed=12)
    out = launch_linear(x[:rows], weight, None, FP32, tile=TILE)
    assert differing(out, linear_reference.linear(x[:rows], weight, None, FP32)) == 0


@pytest.mark.parametrize("tile", [None, TILE])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_linear_bias_strides_and_tiles(tile: GemmTile | None, out_dtype: torch.dtype) -> None:
    x = random(40, 2 * 130, seed=13)[:, 1:131]
    weight = random(130, 72, seed=14).t()
    bias = random(72, seed=15)
    out = launch_linear(x, weight, bias, out_dtype, tile=tile)
    expected = linear_reference.linear(x, weight, bias, out_dtype)
    assert differing(out, expected) == 0
    backwards = linear_reference.linear(x.flip(1), weight.flip(1), bias, FP32)
    assert differing(backwards, linear_reference.linear(x, weight, bias, FP32)) > 0


@pytest.mark.parametrize("num_tiles", TILE_NUMBERS)
def test_row_linear_runs_then_tree(num_tiles: int) -> None:
    run = run_length(num_tiles)
    x, weight = random(5, num_tiles * 128, seed=16), random(6, num_tiles * 128, seed=17)
    out = launch_row_linear_partial(x, weight, num_tiles, run, BF16, tile=TILE)
    expected = row_linear_reference.partial(x, weight, num_tiles, run, BF16)
    assert differing(out, expected) == 0
    assert differing(one_ulp(out), expected) == 1
    leaves = linear_reference.leaf_products(x, weight, num_tiles).to(BF16)
    if num_tiles in (6, 38):
        padded = list(leaves) + [torch.zeros_like(leaves[0])] * (64 - num_tiles)
        assert differing(out, evaluate(balanced(0, 64), padded)) > 0, "a plain tree must differ"
    if num_tiles == 24:
        left_to_right = row_linear_reference.partial(x, weight, num_tiles, num_tiles, BF16)
        assert differing(out, left_to_right) > 0


@pytest.mark.parametrize("segments", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [24, 64, 152])
def test_row_linear_segments(segments: int, width: int) -> None:
    run = 1 if segments == 1 else 2
    x, weight = random(18, segments * width, seed=18), random(17, segments * width, seed=19)
    expected = row_linear_reference.partial(x, weight, segments, run, FP32)
    for tile in (None, TILE):
        out = launch_row_linear_partial(x, weight, segments, run, FP32, tile=tile)
        assert differing(out, expected) == 0
    if segments > 1:
        assert differing(expected, linear_reference.linear(x, weight, None, FP32)) > 0


@pytest.mark.parametrize(("leaves", "run", "dtype"), [(12, 3, BF16), (32, 2, BF16), (8, 2, FP32)])
def test_row_linear_shards_are_subtrees(leaves: int, run: int, dtype: torch.dtype) -> None:
    k_size = leaves * 128
    x, weight = exact_leaves(4, k_size, leaves, seed=20), small_integers(5, k_size, seed=21)
    whole = launch_row_linear_partial(x, weight, leaves, run, dtype, tile=TILE)
    plain = launch_row_linear_partial(x, weight, leaves, leaves, dtype, tile=TILE)
    assert differing(whole, plain) > 0, "the order of these leaves must show"
    for tp in (2, 4):
        part = k_size // tp
        mine = leaves // tp
        parts = [
            launch_row_linear_partial(
                x[:, r * part : (r + 1) * part],
                weight[:, r * part : (r + 1) * part],
                mine,
                min(run, mine),
                dtype,
                tile=TILE,
            )
            for r in range(tp)
        ]
        assert differing(evaluate(balanced(0, tp), parts), whole) == 0


@pytest.mark.parametrize("segments", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 16])
def test_few_rows_add_the_leaves_in_tree_order(segments: int, rows: int) -> None:
    """The counters end at zero, so a second launch on them gives the same."""
    width, columns, block_n = 72, 40, 16
    x, weight = random(rows, segments * width, seed=33), random(columns, segments * width, seed=34)
    expected = row_linear_reference.partial(x, weight, segments, min(segments, 2), FP32)
    parts = torch.full((segments * rows * columns,), float("nan"))
    arrivals = torch.zeros(3, dtype=torch.int32)
    for dtype in (FP32, BF16):
        out = torch.full((rows, columns), float("nan"), dtype=dtype)
        few_kernel[(3, segments)](
            x, weight, out, parts, arrivals, rows, columns, x.stride(0), weight.stride(0),
            LEAF_WIDTH=width, LEAVES=segments, BLOCK_M=16, BLOCK_N=block_n, BLOCK_K=32,
        )  # fmt: skip
        assert differing(out, expected.to(dtype)) == 0
        assert not arrivals.any()


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(
    ("tiles", "parts"), [(2, 1), (3, 1), (6, 2), (7, 1), (19, 1), (24, 4), (32, 8), (38, 2)]
)
def test_few_rows_add_the_tiles_in_the_published_order(tiles: int, parts: int, rows: int) -> None:
    """Parts are whole subtrees; the counters end at zero, so a second launch gives the same."""
    columns, run = 24, run_length(tiles)
    x, weight = random(rows, tiles * 128, seed=35), random(columns, tiles * 128, seed=36)
    expected = row_linear_reference.partial(x, weight, tiles, run, BF16)
    sums = torch.full((parts * rows * columns,), float("nan"), dtype=BF16)
    arrivals = torch.zeros(2, dtype=torch.int32)
    for _ in range(2):
        out = torch.full((rows, columns), float("nan"), dtype=BF16)
        tiles_few_kernel[(2, parts)](
            x, weight, out, sums, arrivals, rows, columns, x.stride(0), weight.stride(0),
            LEAF_WIDTH=128, LEAVES=tiles // parts, RUN=run,
            LEVELS=(tiles // run // parts).bit_length() - 1, PARTS=parts, BLOCK_M=16, BLOCK_N=16,
        )  # fmt: skip
        assert differing(out, expected) == 0
        assert not arrivals.any()
    if tiles > 3 and run < tiles and rows > 1:
        chained = row_linear_reference.partial(x, weight, tiles, tiles, BF16)
        assert differing(chained, expected) > 0, "one run over all tiles must show"


# --- refusals ---------------------------------------------------------------------------------


def test_launchers_refuse_with_the_numbers() -> None:
    x, weight = random(2, 96, seed=28), random(3, 96, seed=29)
    with pytest.raises(ValueError, match="float32"):
        launch_linear(x.float(), weight.float(), None, FP32)
    with pytest.raises(ValueError, match="float16"):
        launch_linear(x, weight, None, torch.float16)
    with pytest.raises(ValueError, match="K=96 in 5 leaves"):
        launch_row_linear_partial(x, weight, 5, 5, BF16)
    with pytest.raises(ValueError, match="12 leaves with runs of 4"):
        launch_row_linear_partial(x, weight, 12, 4, BF16)
    with pytest.raises(ValueError, match="float64"):
        launch_rms_norm(x.double(), weight[0].double(), 1e-6)
    with pytest.raises(ValueError, match="float64"):
        launch_silu_mul(x.double())
    with pytest.raises(ValueError, match="bfloat16"):
        launch_statistics(x, None, None, 0, 64, 1, [64])
    logits = x.float()
    with pytest.raises(ValueError, match="one number or one a row"):
        launch_statistics(logits, torch.ones(3), None, 0, 64, 1, [64])
    one = torch.ones(1)
    with pytest.raises(ValueError, match="float32 or bfloat16 logits with contiguous rows"):
        launch_logits_gradient(logits.t(), one, one, one, one, 0, 2, BF16)
    with pytest.raises(ValueError, match=r"\[32, 64\]"):
        launch_statistics(x.float(), None, None, 0, 64, 2, [32, 64])
    heads = random(2, 1, 20, seed=30)
    with pytest.raises(ValueError, match="head_dim=20"):
        launch_attention(heads, heads, heads, [2], [2], 1.0)


def test_empty_inputs_give_empty_outputs() -> None:
    x, weight = random(0, 128, seed=31), random(3, 128, seed=32)
    assert launch_linear(x, weight, None, BF16).shape == (0, 3)
    assert launch_row_linear_partial(x, weight, 1, 1, BF16).shape == (0, 3)
    assert launch_rms_norm(x, weight[0], 1e-6).shape == (0, 128)
    assert launch_silu_mul(x).shape == (0, 64)


# --- sums over ranks (between processes: `interpreted_ranks.py`) --------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_tree_over_parts(count: int, dtype: torch.dtype) -> None:
    parts = [random(7, 90, seed=i, dtype=dtype, scale=4.0**i) for i in range(count)]
    for groups in (0, 1, 2, count):
        bias = random(90, seed=20) if groups else None
        out = torch.empty(7, 90, dtype=BF16)
        launch_combine(parts, bias, out, span=count // groups if groups else 0, columns=90)
        assert differing(out, combine(parts, bias, groups or 1).to(BF16)) == 0
    # Parts 0 and 2 change places; two parts have one sum in either order.
    swapped = [*reversed(parts[:3]), *parts[3:]]
    out = torch.empty_like(parts[0])
    launch_combine(swapped, None, out, span=0, columns=90)
    assert (differing(out, combine(parts, None, 1)) > 0) == (count > 2)


def test_a_rank_that_nobody_meets_stops_and_does_not_add() -> None:
    areas = Areas(2, 1 << 12, 1 << 13)
    buffers = [torch.zeros(areas.total, dtype=torch.uint8) for _ in range(2)]
    out = torch.full((3, 5), 7.0, dtype=BF16)
    with pytest.raises(Exception, match="InlineAsm|inline_asm"):  # the interpreter's trap
        launch_one_shot(
            torch.ones(3, 5), None, out, Workspace(0, areas, buffers), span=0, columns=5, polls=3
        )
    assert (out == 7.0).all()


def test_what_the_kernels_do_not_take_is_refused() -> None:
    areas = Areas(2, 1 << 12, 1 << 13)
    workspace = Workspace(0, areas, [torch.zeros(areas.total, dtype=torch.uint8)] * 2)
    x, out = torch.ones(3, 5), torch.empty(3, 5, dtype=BF16)
    for wrong, bias in (
        (x.double(), None),
        (x.t().contiguous().t(), None),
        (x, torch.ones(4)),
        (torch.ones(64, 17), None),
    ):
        with pytest.raises(ValueError, match="tree_all_reduce"):
            launch_one_shot(wrong, bias, out, workspace, span=2, columns=5)
