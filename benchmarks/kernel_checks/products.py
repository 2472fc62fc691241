"""Products: the written order of the leaves; bits that do not move with tile, rows or shards."""

from __future__ import annotations

import torch

from benchmarks.bitwise import differing, exact_leaves, one_ulp, random, small_integers
from benchmarks.kernel_checks.setting import Setting
from sglang_patch.ops.linear.kernel import TILES as LINEAR_TILES
from sglang_patch.ops.linear.kernel import GemmTile, launch_linear
from sglang_patch.ops.row_linear import reference as row_linear_reference
from sglang_patch.ops.row_linear.kernel import TILES as ROW_TILES
from sglang_patch.ops.row_linear.kernel import launch_row_linear_partial
from sglang_patch.ops.tree_all_reduce.reference import evaluate
from sglang_patch.schema.reduction import balanced, run_length

BF16, FP32 = torch.bfloat16, torch.float32


# Beyond the tables: shapes that a later table may want, and that must give the same bits.
_EXTRA_TILES = (
    GemmTile(rows=0, block_m=16, block_n=128, warps=4, stages=3),
    GemmTile(rows=0, block_m=64, block_n=64, warps=4, stages=3),
    GemmTile(rows=0, block_m=128, block_n=64, warps=4, stages=3),
)


def _distance(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Largest error over the scale of the row, against fp64."""
    exact = x.double() @ weight.double().t()
    return float((out.double() - exact).abs().max() / exact.abs().max())


def linear(s: Setting) -> str:
    """Bits do not move with tile or rows; exact integers come out exact; near fp64."""
    rows, worst = max(s.rows), 0.0
    for k_size in (*s.k_sizes, 200):
        x = random(rows, k_size, seed=11).to(s.device)
        weight = random(s.columns, k_size, seed=12).to(s.device)
        bias = random(s.columns, seed=15).to(s.device)
        out = launch_linear(x, weight, None, FP32)
        worst = max(worst, _distance(out, x, weight))
        biased = launch_linear(x, weight, bias, BF16)
        assert differing(biased, (out + bias.float()).to(BF16)) == 0, f"K {k_size}: bias"
        for tile in (*LINEAR_TILES, *_EXTRA_TILES):
            again = launch_linear(x, weight, None, FP32, tile=tile)
            assert differing(again, out) == 0, f"K {k_size}: {tile}"
        for m in s.rows:
            assert differing(launch_linear(x[:m], weight, None, FP32), out[:m]) == 0, f"M {m}"
            last = launch_linear(x[rows - m :], weight, None, FP32)
            assert differing(last, out[rows - m :]) == 0, f"last {m} rows"
        strided = torch.cat((weight, x[:1].expand(s.columns, -1)), 1)[:, :k_size]
        assert differing(launch_linear(x, strided, None, FP32), out) == 0, f"K {k_size}: strides"
        left = small_integers(17, k_size, seed=17).to(s.device)
        right = small_integers(s.columns, k_size, seed=18).to(s.device)
        found = launch_linear(left, right, None, FP32)
        assert torch.equal(found.double(), left.double() @ right.double().t()), f"K {k_size}"
        backwards = launch_linear(x.flip(1), weight.flip(1), None, FP32)
        assert differing(backwards, out) > 0, "the order of k must show"
    assert worst < 1e-4, worst
    return f"K {s.k_sizes}, N {s.columns}, worst distance to fp64 {worst:.1e}"


def row_linear_order(s: Setting) -> str:
    """Leaves whose products are exact: only the order of the leaves decides, and it is written."""
    for num_tiles in s.tile_numbers:
        for dtype in (BF16, FP32):
            run, k_size = run_length(num_tiles), num_tiles * 128
            x = exact_leaves(33, k_size, num_tiles, seed=16)
            weight = small_integers(40, k_size, seed=17)
            expected = row_linear_reference.partial(x, weight, num_tiles, run, dtype)
            pair = x.to(s.device), weight.to(s.device)
            for tile in (None, *ROW_TILES):
                out = launch_row_linear_partial(*pair, num_tiles, run, dtype, tile=tile).cpu()
                label = f"T {num_tiles}, {dtype}, {tile}"
                assert differing(out, expected) == 0, label
                assert differing(one_ulp(out), expected) == 1, label
            if num_tiles not in (1, 2, 3):
                reversed_runs = row_linear_reference.partial(
                    x.flip(1), weight.flip(1), num_tiles, run, dtype
                )
                assert differing(reversed_runs, expected) > 0, f"T {num_tiles}: order unseen"
    return f"T {s.tile_numbers}, bf16 and fp32"


def row_linear_invariance(s: Setting) -> str:
    """Random numbers: the same bits over tiles, rows and shards; near fp64."""
    rows, worst = max(s.rows), 0.0
    compared = []
    for k_size in s.k_sizes:
        x = random(rows, k_size, seed=18).to(s.device)
        weight = random(s.columns, k_size, seed=19).to(s.device)
        plans = [(n, 1 if n == 1 else 2, FP32) for n in (1, 2, 4, 8)]
        plans.append((k_size // 128, run_length(k_size // 128), BF16))
        for leaves, run, dtype in plans:
            label = f"K {k_size}, {leaves} leaves, {dtype}"
            out = launch_row_linear_partial(x, weight, leaves, run, dtype)
            if dtype == FP32:
                worst = max(worst, _distance(out, x, weight))
            for tile in (*ROW_TILES, *_EXTRA_TILES):
                again = launch_row_linear_partial(x, weight, leaves, run, dtype, tile=tile)
                assert differing(again, out) == 0, f"{label}: {tile}"
            for m in s.rows:
                part = launch_row_linear_partial(x[:m], weight, leaves, run, dtype)
                assert differing(part, out[:m]) == 0, f"{label}: M {m}"
            if leaves == 1:
                assert differing(launch_linear(x, weight, None, FP32), out) == 0, label
            for tp in (2, 4, 8):
                mine = leaves // tp
                if mine * tp != leaves or (mine % run and mine != 1):
                    continue  # a shard would be part of a leaf or of a run
                cuts = [slice(r * k_size // tp, (r + 1) * k_size // tp) for r in range(tp)]
                parts = [
                    launch_row_linear_partial(x[:, c], weight[:, c], mine, min(run, mine), dtype)
                    for c in cuts
                ]
                assert differing(evaluate(balanced(0, tp), parts), out) == 0, f"{label}: tp {tp}"
            if leaves > 3:
                plain = launch_row_linear_partial(x, weight, leaves, leaves, dtype)
                assert run == leaves or differing(plain, out) > 0, f"{label}: order unseen"
            compared.append((k_size, leaves))
    assert worst < 1e-4, worst
    return f"(K, leaves) {compared}, worst distance to fp64 {worst:.1e}"
