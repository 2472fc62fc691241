"""The reference ops: a row's bits beside any neighbours, in any shape, under any sharding."""

from __future__ import annotations

import pytest
import torch

from miles_launcher.conformance.bits import differing, one_ulp, random
from sglang_patch.ops import (
    attention,
    combine_partials,
    combine_segments,
    linear,
    log_softmax,
    rms_norm,
    rope,
    rope_table,
    row_linear,
    row_linear_partial,
    segment_statistics,
    silu_mul,
    temperature_logits,
)
from sglang_patch.ops.linear.reference import leaf_products
from sglang_patch.ops.row_linear import reference as row_linear_reference
from sglang_patch.ops.tree_all_reduce.reference import evaluate
from sglang_patch.schema.reduction import balanced, row_reduction
from sglang_patch.schema.vocabulary import vocabulary_segments

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
V1, V2 = "qwen3_dense_true_on_policy_v1", "qwen3_dense_true_on_policy_v2"
ROWS = (1, 16, 63, 64, 65, 127, 128, 129, 255, 256, 257)


def plain_tree(x: torch.Tensor, weight: torch.Tensor, num_leaves: int) -> torch.Tensor:
    """The wrong order of contract v1: a binary tree over all tiles, zeros as padding."""
    leaves = list(leaf_products(x, weight, num_leaves).to(BF16))
    size = 1 << (num_leaves - 1).bit_length()
    return evaluate(balanced(0, size), leaves + [torch.zeros_like(leaves[0])] * (size - num_leaves))


# --- rows -------------------------------------------------------------------------------------


def test_every_op_gives_a_row_the_same_bits_in_every_batch() -> None:
    x = random(257, 96, seed=1)
    weight, norm = random(8, 96, seed=2), 1.0 + random(96, seed=3, dtype=FP32, scale=0.1)
    residual = random(257, 96, seed=4, dtype=FP32)
    v1, v2 = row_reduction(V1, 96), row_reduction(V2, 96)
    segments = vocabulary_segments(V2, 70)
    ops = {
        "linear": lambda r: linear(x[r], weight),
        "row_linear v1": lambda r: row_linear(x[r], weight, reduction=v1),
        "row_linear v2": lambda r: row_linear(x[r], weight, reduction=v2),
        "rms_norm": lambda r: rms_norm(x[r], norm, 1e-6, residual=residual[r])[0],
        "stream": lambda r: rms_norm(x[r], norm, 1e-6, residual=residual[r])[1],
        "silu_mul": lambda r: silu_mul(x[r]),
        "log_softmax": lambda r: log_softmax(residual[r], segments),
    }
    for name, op in ops.items():
        whole = op(slice(0, 257))
        for rows in ROWS:
            assert differing(op(slice(0, rows)), whole[:rows]) == 0, (name, rows)
            assert differing(op(slice(257 - rows, 257)), whole[257 - rows :]) == 0, (name, rows)
        assert differing(one_ulp(whole), whole) == 1, name


def test_the_shape_and_strides_of_the_input_change_no_bit() -> None:
    x, weight = random(6, 256, seed=5), random(10, 256, seed=6)
    wide = torch.cat((x, x.flip(0)), dim=1)[:, :256]
    assert not wide.is_contiguous()
    scattered = weight.t().contiguous().t()
    reductions = [row_reduction(V1, 256), row_reduction(V2, 256)]
    for op in (
        lambda a, w: linear(a, w, out_dtype="float32"),
        lambda a, w: row_linear(a, w, reduction=reductions[0]),
        lambda a, w: row_linear(a, w, reduction=reductions[1]),
    ):
        flat = op(x, weight)
        assert differing(op(x.view(2, 3, 256), weight).view(6, 10), flat) == 0
        assert differing(op(wide, scattered), flat) == 0
    norm = 1.0 + random(64, seed=7, scale=0.1)
    heads = x.view(6, 4, 64)
    out = rms_norm(heads, norm, 1e-6)[0]
    assert differing(rms_norm(heads.transpose(0, 1), norm, 1e-6)[0].transpose(0, 1), out) == 0
    assert differing(rms_norm(wide[:, 64:128], norm, 1e-6)[0], out[:, 1]) == 0


def test_linear_is_one_accumulator_then_one_rounding() -> None:
    x, weight, bias = random(4, 200, seed=8), random(6, 200, seed=9), random(6, seed=10)
    logits = linear(x, weight, bias, out_dtype="float32")
    accumulator = torch.zeros(4, 6)
    for k in range(200):
        accumulator = accumulator + x[:, k : k + 1].float() * weight[:, k].float()
    assert differing(logits, accumulator + bias.float()) == 0
    assert differing(linear(x, weight, bias), logits.to(BF16)) == 0
    backwards = linear(x.flip(1), weight.flip(1), bias, out_dtype="float32")
    assert differing(backwards, logits) > 0, "the order of k must show"
    exact = linear(x.double(), weight.double(), bias.double())
    assert exact.dtype == FP64 and (logits.double() - exact).abs().max() < 1e-4


# --- row_linear -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contract", "k_size", "tp_sizes"),
    [
        (V1, 1536, (1, 2, 4)),
        (V1, 4096, (1, 2, 4, 8)),
        (V1, 4864, (1, 2)),
        (V1, 9728, (1, 2, 4)),
        (V2, 1536, (1, 2, 4, 8)),
        (V2, 4864, (1, 2, 4, 8)),
        (V2, 9728, (1, 2, 4, 8)),
    ],
)
def test_shards_finish_the_oracle_s_tree(
    contract: str, k_size: int, tp_sizes: tuple[int, ...]
) -> None:
    reduction = row_reduction(contract, k_size)
    x, weight = random(3, k_size, seed=11), random(8, k_size, seed=12)
    oracle = row_linear_reference.row_linear(x, weight, None, reduction)
    for tp in tp_sizes:
        cut = k_size // tp
        parts = [
            row_linear_partial(x[:, r : r + cut], weight[:, r : r + cut], reduction, tp)
            for r in range(0, k_size, cut)
        ]
        assert differing(combine_partials(parts, None, reduction).to(BF16), oracle) == 0, tp
        if tp == 4:
            order = [parts[i] for i in (0, 2, 1, 3)]
            wrong = combine_partials(order, None, reduction)
            assert differing(wrong, combine_partials(parts, None, reduction)) > 0, "rank order"
    assert differing(row_linear(x, weight, reduction=reduction), oracle) == 0
    assert differing(one_ulp(oracle), oracle) == 1
    # The order of these inputs shows: one accumulator over all of K is another number.
    once = linear(x, weight, out_dtype="float32")
    whole = row_linear_partial(x, weight, reduction, 1)
    assert differing(whole, once.to(whole.dtype)) > 0


@pytest.mark.parametrize("num_tiles", [6, 12, 19, 38, 76])
def test_a_plain_tree_over_v1_tiles_is_another_number(num_tiles: int) -> None:
    k_size = num_tiles * 128
    x, weight = random(6, k_size, seed=13), random(16, k_size, seed=14)
    out = row_linear(x, weight, reduction=row_reduction(V1, k_size))
    assert differing(plain_tree(x, weight, num_tiles), out) > 0


@pytest.mark.parametrize("num_tiles", [1, 2, 3, 4, 8])
def test_a_plain_tree_agrees_where_a_run_has_at_most_three_tiles_in_all(num_tiles: int) -> None:
    k_size = num_tiles * 128
    x, weight = random(4, k_size, seed=15), random(6, k_size, seed=16)
    out = row_linear(x, weight, reduction=row_reduction(V1, k_size))
    assert differing(plain_tree(x, weight, num_tiles), out) == 0


@pytest.mark.parametrize("rollout_tp", [1, 2, 4])
def test_v1_bias_enters_the_first_rollout_rank(rollout_tp: int) -> None:
    k_size = 1536
    reduction = row_reduction(V1, k_size, rollout_tp=rollout_tp)
    x, weight, bias = random(5, k_size, seed=17), random(8, k_size, seed=18), random(8, seed=19)
    oracle = row_linear_reference.row_linear(x, weight, bias, reduction)
    cut = k_size // rollout_tp
    locals_ = [
        row_linear_partial(x[:, r : r + cut], weight[:, r : r + cut], reduction, rollout_tp)
        for r in range(0, k_size, cut)
    ]
    locals_[0] = locals_[0] + bias
    assert differing(evaluate(balanced(0, rollout_tp), locals_), oracle) == 0
    # One process that owns all of K mirrors the rollout's partition.
    assert differing(row_linear(x, weight, bias, reduction=reduction), oracle) == 0
    after = row_linear(x, weight, reduction=reduction) + bias
    assert rollout_tp == 1 or differing(after, oracle) > 0, "adding it at the root must show"


def test_v2_bias_enters_at_the_root_in_fp32() -> None:
    reduction = row_reduction(V2, 1536)
    x, weight, bias = random(5, 1536, seed=20), random(8, 1536, seed=21), random(8, seed=22)
    oracle = row_linear_reference.row_linear(x, weight, bias, reduction)
    root = row_linear_partial(x, weight, reduction, 1) + bias.float()
    assert differing(oracle, root.to(BF16)) == 0
    assert differing(row_linear(x, weight, bias, reduction=reduction), oracle) == 0
    rounded_first = row_linear(x, weight, reduction=reduction) + bias
    assert differing(rounded_first, oracle) > 0, "a rounding before the bias must show"


@pytest.mark.parametrize("k_size", [1216, 448, 2368, 192])
def test_v1_follows_the_rollout_s_partition_off_the_tile(k_size: int) -> None:
    reduction = row_reduction(V1, k_size, rollout_tp=2)
    x, weight, bias = random(3, k_size, seed=23), random(4, k_size, seed=24), random(4, seed=25)
    assert reduction.path == "rollout-partition"
    half = k_size // 2
    left = linear(x[:, :half], weight[:, :half]) + bias
    right = linear(x[:, half:], weight[:, half:])
    assert differing(row_linear(x, weight, bias, reduction=reduction), left + right) == 0


# --- the other ops ----------------------------------------------------------------------------


def test_rms_norm_rounds_before_the_weight() -> None:
    x, residual = random(7, 128, seed=26), random(7, 128, seed=27, dtype=FP32)
    weight = 1.0 + random(128, seed=28, dtype=FP32, scale=0.1)
    out, stream = rms_norm(x, weight, 1e-6, residual=residual)
    assert differing(stream, x.float() + residual) == 0
    exact = stream.double() * torch.rsqrt(stream.double().square().mean(-1, True) + 1e-6)
    assert (out.double() - exact * weight.double()).abs().max() < 0.05
    assert differing((exact * weight.double()).to(BF16), out) > 0, "the early rounding must show"


def test_silu_mul_and_rope_are_near_fp64() -> None:
    x = random(5, 64, seed=29, scale=3.0)
    gate, up = x.double().chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    assert (silu_mul(x).double() - exact).abs().max() < 0.01 * exact.abs().max()
    table = rope_table(32, 5000, 1e6)
    positions = torch.tensor([0, 7, 4097])
    query, key = random(3, 4, 32, seed=30), random(3, 2, 32, seed=31)
    out, _ = rope(query, key, positions, table)
    assert differing(out[:1], query[:1]) == 0, "position 0 rotates by nothing"
    halves = torch.view_as_complex(torch.stack(query.double().chunk(2, -1), dim=-1).contiguous())
    turned = halves * torch.polar(
        torch.ones(3, 16, dtype=FP64),
        positions[:, None] * 1e6 ** (-torch.arange(0, 32, 2, dtype=FP64) / 32),
    ).unsqueeze(1)
    exact = torch.cat((turned.real, turned.imag), dim=-1)
    assert (out.double() - exact).abs().max() < 0.02
    alone, _ = rope(query[2:], key[2:], positions[2:], table)
    assert differing(alone, out[2:]) == 0


def test_attention_does_not_see_neighbours_chunks_or_other_heads() -> None:
    lengths = [5, 1, 9, 30]
    tokens = sum(lengths)
    query = random(tokens, 4, 16, seed=32)
    key, value = random(tokens, 2, 16, seed=33), random(tokens, 2, 16, seed=34)
    out = attention(query, key, value, query_lengths=lengths, scale=0.25)
    start = 0
    for length in lengths:
        stop = start + length
        for queries in range(1, length + 1, 3):
            part = attention(
                query[stop - queries : stop],
                key[start:stop],
                value[start:stop],
                query_lengths=[queries],
                key_lengths=[length],
                scale=0.25,
            )
            assert differing(part, out[stop - queries : stop]) == 0
        start = stop
    half = attention(query[:, 2:], key[:, 1:], value[:, 1:], query_lengths=lengths, scale=0.25)
    assert differing(half, out[:, 2:]) == 0
    whole = [t[15:].double().transpose(0, 1).unsqueeze(0) for t in (query, key, value)]
    exact = torch.nn.functional.scaled_dot_product_attention(
        *whole, is_causal=True, scale=0.25, enable_gqa=True
    )
    assert (out[15:].double() - exact[0].transpose(0, 1)).abs().max() < 0.02


@pytest.mark.parametrize("vocab_size", [70, 500, 1300])
def test_log_softmax_is_the_same_from_every_sharding(vocab_size: int) -> None:
    segments = vocabulary_segments(V2, vocab_size)
    logits = random(5, segments.padded_size, seed=35, dtype=FP32, scale=4.0)
    logits[:, vocab_size:] = 1e4  # padding must not enter
    out = log_softmax(logits, segments)
    exact = logits[:, :vocab_size].double().log_softmax(-1)
    assert (out.double() - exact).abs().max() < 1e-5
    largest, total = segment_statistics(logits, segments, 0, 8)
    normaliser = combine_segments(largest, total)
    for tp in (2, 4, 8):
        parts = []
        for rank in range(tp):
            start, stop = segments.shard(tp, rank)
            parts.append(
                segment_statistics(logits[:, start:stop], segments, rank * 8 // tp, 8 // tp)
            )
        gathered = [torch.cat(p, dim=1) for p in zip(*parts, strict=True)]
        assert differing(combine_segments(*gathered), normaliser) == 0, tp
    unpadded = segment_statistics(logits[:, :vocab_size], segments, 0, 8)
    assert differing(unpadded[1], total) == 0
    assert differing(logits.exp().log_softmax(-1)[:, :vocab_size], out) > 0


def test_temperature_divides_in_fp32() -> None:
    logits = random(4, 50, seed=36, dtype=FP32, scale=5.0)
    out = temperature_logits(logits, torch.full((4, 1), 0.8))
    assert out.dtype == FP32 and differing(out, logits / 0.8) == 0
    through_bf16 = (logits.to(BF16) / 0.8).to(BF16).float()
    assert differing(through_bf16, out) > 0


# --- refusals ---------------------------------------------------------------------------------


def test_refusals_carry_the_numbers() -> None:
    x, weight = random(2, 96, seed=37), random(3, 96, seed=38)
    cases = {
        r"\(2, 96\).*\(3, 64\)": lambda: linear(x, weight[:, :64]),
        "float32.*bfloat16": lambda: linear(x.float(), weight),
        "out_dtype='float8'": lambda: linear(x, weight, out_dtype="float8"),
        "K_local=96.*K=128": lambda: row_linear(x, weight, reduction=row_reduction(V2, 128)),
        "torch.float16": lambda: rms_norm(x.half(), weight[0], 1e-6),
        r"weight \(64,\)": lambda: rms_norm(x, weight[0, :64], 1e-6),
        "residual torch.bfloat16": lambda: rms_norm(x, weight[0], 1e-6, residual=x),
        "95": lambda: silu_mul(x[:, :95]),
        "head_dim=7": lambda: rope_table(7, 8, 1e6),
        "logits are torch.bfloat16": lambda: log_softmax(x, vocabulary_segments(V2, 96)),
        "96 columns": lambda: log_softmax(x.float(), vocabulary_segments(V2, 100)),
        "K=100.*segments=8": lambda: row_reduction(V2, 100),
        "tensor_parallel_size=3": lambda: row_reduction(V1, 384, rollout_tp=3),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()
    heads = random(4, 3, 16, seed=39)
    with pytest.raises(ValueError, match="4 queries and 5 keys"):
        attention(heads, heads, heads, query_lengths=[4], key_lengths=[5], scale=1.0)
    with pytest.raises(ValueError, match="3 heads over 2"):
        attention(heads, heads[:, :2], heads[:, :2], query_lengths=[4], scale=1.0)
    with pytest.raises(ValueError, match="cast|float32"):
        rope(heads, heads, torch.arange(4), rope_table(16, 8, 1e6).to(BF16))
