"""Elementwise ops, norms and log-softmax statistics: the bits of the CPU reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from benchmarks.bitwise import differing, one_ulp, random
from benchmarks.kernel_checks.setting import Setting
from sglang_patch.ops import elementary, elementary_kernel
from sglang_patch.ops.log_softmax import reference as log_softmax_reference
from sglang_patch.ops.log_softmax.kernel import (
    launch_combine_segments,
    launch_segment_statistics,
)
from sglang_patch.ops.rms_norm import reference as rms_norm_reference
from sglang_patch.ops.rms_norm.kernel import launch_rms_norm
from sglang_patch.ops.rope import reference as rope_reference
from sglang_patch.ops.rope.kernel import launch_rope
from sglang_patch.ops.rope.op import rope_table
from sglang_patch.ops.silu_mul import reference as silu_mul_reference
from sglang_patch.ops.silu_mul.kernel import launch_silu_mul
from sglang_patch.schema.vocabulary import vocabulary_segments

BF16, FP32 = torch.bfloat16, torch.float32


@triton.jit
def exp_log_kernel(x_ptr, exp_ptr, log_ptr, n, BLOCK: tl.constexpr):
    """exp(x) and log(|x|) of n numbers."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offset, mask=offset < n, other=1.0)
    tl.store(exp_ptr + offset, elementary_kernel.exp(x), mask=offset < n)
    tl.store(log_ptr + offset, elementary_kernel.log(tl.abs(x)), mask=offset < n)


@triton.jit
def pair_sum_kernel(
    x_ptr, out_ptr, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LEVELS: tl.constexpr
):
    """Pair sums of ROWS contiguous rows of `length` numbers."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    x = tl.load(
        x_ptr + row[:, None] * length + column[None, :], mask=(column < length)[None, :], other=0.0
    )
    tl.store(out_ptr + row, elementary_kernel.pair_sum(x, ROWS, COLUMNS, LEVELS))


def exponentials(s: Setting) -> str:
    """exp and log have the bits of `elementary`; the platform's own exp has not."""
    x = torch.cat(
        (
            torch.linspace(-110.0, 88.0, 40001),
            random(20000, seed=1, dtype=FP32, scale=1e-3),
            torch.tensor([0.0, -0.0, float("-inf"), float("nan"), -87.33654, -87.3366, 88.3]),
        )
    )
    there = x.to(s.device)
    exp_out, log_out = torch.empty_like(there), torch.empty_like(there)
    grid = (triton.cdiv(x.numel(), 4096),)
    exp_log_kernel[grid](
        there, exp_out, log_out, x.numel(), BLOCK=4096, **elementary_kernel.UNFUSED
    )
    found, expected = exp_out.cpu(), elementary.exp(x)
    assert differing(found.nan_to_num(-1.0), expected.nan_to_num(-1.0)) == 0, "exp"
    assert torch.equal(found.isnan(), x.isnan()), "exp of NaN"
    normal = torch.isfinite(x) & (x.abs() > 1e-37)
    assert differing(log_out.cpu()[normal], elementary.log(x.abs()[normal])) == 0, "log"
    assert differing(found, one_ulp(found)) == 1, "one ulp must show"
    assert differing(expected[:40001], x[:40001].exp()) > 0, "another exp must show"
    return f"{x.numel()} arguments"


def pair_sums(s: Setting) -> str:
    """The reduction is the written tree, whatever the length; a running sum is another number."""
    lengths = (1, 2, 3, 7, 64, 100, *s.hidden)
    for length in lengths:
        x = random(4, length, seed=length, dtype=FP32)
        columns = triton.next_power_of_2(length)
        out = torch.empty(4, device=s.device)
        levels = columns.bit_length() - 1
        pair_sum_kernel[(1,)](x.to(s.device), out, length, ROWS=4, COLUMNS=columns, LEVELS=levels)
        assert differing(out.cpu(), elementary.pair_sum(x)) == 0, f"length {length}"
        if length >= 64:
            assert differing(out.cpu(), x.cumsum(-1)[:, -1]) > 0, f"length {length}: order unseen"
    return f"lengths {lengths}"


def rms_norm(s: Setting) -> str:
    """Bits of the reference, with and without residual, per hidden row and per head."""
    rows = max(s.rows)
    for hidden in s.hidden:
        weight = 1.0 + random(hidden, seed=3, dtype=FP32, scale=0.1)
        residual = random(rows, hidden, seed=4, dtype=FP32, scale=3.0)
        for dtype in (BF16, FP32):
            x = random(rows, hidden, seed=2, dtype=dtype)
            for other in (None, residual):
                expected = rms_norm_reference.rms_norm(x, weight, other, 1e-6)
                for m in s.rows:
                    part = None if other is None else other[:m].to(s.device)
                    out = launch_rms_norm(x[:m].to(s.device), weight.to(s.device), part, 1e-6)
                    label = f"hidden {hidden}, rows {m}, {dtype}"
                    assert differing(out[0].cpu(), expected[0][:m]) == 0, label
                    assert differing(out[1].cpu(), expected[1][:m]) == 0, label
    fused = random(rows, 10 * 64, seed=5)
    weight = 1.0 + random(64, seed=6, scale=0.1)
    heads = fused.to(s.device)[:, 2 * 64 : 6 * 64].view(rows, 4, 64)
    per_head = launch_rms_norm(heads, weight.to(s.device), None, 1e-6)[0].cpu()
    wanted = rms_norm_reference.rms_norm(heads.cpu(), weight, None, 1e-6)[0]
    assert differing(per_head, wanted) == 0, "heads of a fused projection"
    return f"hidden {s.hidden}, rows {s.rows}, bf16 and fp32"


def rope(s: Setting) -> str:
    """Bits of the reference on slices of a fused projection; unrounded products differ."""
    tokens, heads, kv_heads = 37, 9, 3
    for head_dim in s.head_dims:
        table = rope_table(head_dim, 8192, 1e6)
        positions = torch.arange(tokens) * 227
        fused = random(tokens, (heads + 2 * kv_heads) * head_dim, seed=7)
        query = fused[:, : heads * head_dim].view(tokens, heads, head_dim)
        key = fused[:, heads * head_dim :][:, : kv_heads * head_dim]
        key = key.view(tokens, kv_heads, head_dim)
        for wide in (False, True):
            pair = [t.float() if wide else t for t in (query, key)]
            expected = rope_reference.rope(pair[0], pair[1], positions, table)
            moved = [t.to(s.device) for t in (*pair, positions, table)]
            out = launch_rope(*moved)
            for found, wanted in zip(out, expected, strict=True):
                assert differing(found.cpu(), wanted) == 0, f"head_dim {head_dim}, wide {wide}"
            if wide:
                double = [t.double() for t in pair]
                unrounded = rope_reference.rope(double[0], double[1], positions, table.double())[
                    0
                ].float()
                assert differing(expected[0], unrounded) > 0, "unrounded products must show"
    return f"{tokens} positions up to {(tokens - 1) * 227}, head_dim {s.head_dims}"


def silu_mul(s: Setting) -> str:
    """Bits of the reference; rounding the SiLU before the product is another number."""
    for width in s.widths:
        for dtype in (BF16, FP32):
            x = random(19, 2 * width, seed=8, dtype=dtype, scale=4.0)
            x[0, :6] = torch.tensor([0.0, -0.0, 90.0, -90.0, 3e4, -3e4])
            out = launch_silu_mul(x.to(s.device)).cpu()
            assert differing(out, silu_mul_reference.silu_mul(x)) == 0, f"width {width}, {dtype}"
            gate, up = x.chunk(2, -1)
            twice = torch.nn.functional.silu(gate.float()).to(BF16).float() * up.float()
            assert differing(out, twice.to(dtype)) > 0, "two roundings must show"
    return f"widths {s.widths}, bf16 and fp32"


def log_softmax(s: Setting) -> str:
    """Segment statistics and their combination have the reference's bits, sharded or whole."""
    for vocab_size in s.vocabularies:
        segments = vocabulary_segments("qwen3_dense_true_on_policy_v2", vocab_size)
        logits = random(16, segments.padded_size, seed=9, dtype=FP32, scale=3.0)
        logits[:, vocab_size:] = 1e4  # padding must not enter
        real = [segments.real_columns(i) for i in range(8)]
        there = logits.to(s.device)
        found = launch_segment_statistics(there, segments.width, 8, real)
        expected = log_softmax_reference.segment_statistics(logits, segments.width, 8, real)
        for a, b in zip(found, expected, strict=True):
            assert differing(a.cpu(), b) == 0, f"vocabulary {vocab_size}"
        for tp in (2, 4, 8):
            for rank in range(tp):
                start, stop = segments.shard(tp, rank)
                mine = slice(rank * 8 // tp, (rank + 1) * 8 // tp)
                shard = launch_segment_statistics(
                    there[:, start:stop], segments.width, 8 // tp, real[mine]
                )
                for a, b in zip(shard, found, strict=True):
                    assert differing(a, b[:, mine]) == 0, f"vocabulary {vocab_size}, tp {tp}"
        normaliser = launch_combine_segments(*found).cpu()
        assert differing(normaliser, log_softmax_reference.combine_segments(*expected)) == 0
        whole = launch_segment_statistics(there, vocab_size, 1, [vocab_size])
        wanted = log_softmax_reference.segment_statistics(logits, vocab_size, 1, [vocab_size])
        assert differing(whole[1].cpu(), wanted[1]) == 0, f"one segment of {vocab_size}"
        exponentials = elementary.exp(logits[:, :vocab_size] - wanted[0])
        shifted = elementary.pair_sum(exponentials.flip(-1))
        assert differing(wanted[1][:, 0], shifted) > 0, "order unseen"
    return f"vocabularies {s.vocabularies}"
