"""Conformance of the kernels on the device at hand: one function a claim.

Each function raises AssertionError where a claim fails and returns what it compared. Claims of exact
bits are against the CPU reference; where the inner order of a product is the tensor core's own, the
claim is that bits do not move with tile, rows or shards, and the distance to fp64 is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from benchmarks.bitwise import differing, exact_leaves, one_ulp, random, small_integers
from sglang_patch.ops import elementary, elementary_kernel
from sglang_patch.ops.attention.kernel import launch_flash3, launch_triton
from sglang_patch.ops.linear.kernel import TILES as LINEAR_TILES
from sglang_patch.ops.linear.kernel import GemmTile, launch_linear
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
from sglang_patch.ops.row_linear import reference as row_linear_reference
from sglang_patch.ops.row_linear.kernel import TILES as ROW_TILES
from sglang_patch.ops.row_linear.kernel import launch_row_linear_partial
from sglang_patch.ops.silu_mul import reference as silu_mul_reference
from sglang_patch.ops.silu_mul.kernel import launch_silu_mul
from sglang_patch.ops.tree_all_reduce.reference import evaluate
from sglang_patch.schema.reduction import balanced, run_length
from sglang_patch.schema.vocabulary import vocabulary_segments

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how large. `rows` are batch sizes around tile borders; K sizes are per layer."""

    device: str
    rows: tuple[int, ...]
    hidden: tuple[int, ...]
    widths: tuple[int, ...]
    vocabularies: tuple[int, ...]
    tile_numbers: tuple[int, ...]
    k_sizes: tuple[int, ...]
    columns: int
    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]


FULL = Setting(
    device="cuda",
    rows=(1, 16, 63, 64, 65, 127, 128, 129, 255, 256, 257),
    hidden=(128, 1024, 2560, 4096, 5120),
    widths=(3072, 9728),
    vocabularies=(300, 151936),
    tile_numbers=(1, 2, 3, 6, 7, 19, 24, 37, 38, 76, 100, 148),
    k_sizes=(2560, 4096, 4864, 9728, 12288),
    columns=640,
    lengths=(1, 5, 9, 64, 65, 300, 1025),
    head_dims=(64, 128),
)
# For the interpreter: the same claims, so that what runs on a GPU has run before.
SMALL = Setting(
    device="cpu",
    rows=(1, 16, 17),
    hidden=(96, 2560),
    widths=(72,),
    vocabularies=(300,),
    tile_numbers=(1, 3, 6),
    k_sizes=(384,),
    columns=24,
    lengths=(1, 9, 66),
    head_dims=(32,),
)


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
    out = launch_rms_norm(heads, weight.to(s.device), None, 1e-6)[0].cpu()
    expected = rms_norm_reference.rms_norm(heads.cpu(), weight, None, 1e-6)
    assert differing(out, expected[0]) == 0, "heads of a fused projection"
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
                unrounded = rope_reference.rope(*double, positions, table.double())[0].float()
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
        logits = random(4, segments.padded_size, seed=9, dtype=FP32, scale=3.0)
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
        assert differing(wanted[1][:, 0], exponentials.cumsum(-1)[:, -1]) > 0, "order unseen"
    return f"vocabularies {s.vocabularies}"


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
        integers = [small_integers(n, k_size, seed=n).to(s.device) for n in (17, s.columns)]
        exact = integers[0].double() @ integers[1].double().t()
        assert torch.equal(launch_linear(*integers, None, FP32).double(), exact), f"K {k_size}"
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


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence in fp64, [tokens, heads, dim] -> (out, lse [heads, tokens]), by the formula."""
    q, k, v = (t.cpu().double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    scores = scores.masked_fill(~causal, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def _attention(s: Setting, launch: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> str:
    heads, kv_heads = 4, 2
    lengths = list(s.lengths)
    tokens, worst, worst_lse = sum(lengths), 0.0, 0.0
    for head_dim in s.head_dims:
        scale = head_dim**-0.5
        q = random(tokens, heads, head_dim, seed=22).to(s.device)
        k, v = (random(tokens, kv_heads, head_dim, seed=n).to(s.device) for n in (23, 24))
        out, lse = launch(q, k, v, lengths, lengths, scale)
        assert lse.shape == (heads, tokens) and lse.dtype == FP32, (lse.shape, lse.dtype)
        start = 0
        for length in lengths:
            stop = start + length
            mine = slice(start, stop)
            exact, exact_lse = exact_attention(q[mine], k[mine], v[mine], scale)
            worst = max(worst, float((out[mine].cpu().double() - exact).abs().max()))
            distance = (lse[:, mine].cpu().double() - exact_lse).abs().max()
            worst_lse = max(worst_lse, float(distance))
            for queries in sorted({1, (length + 1) // 2, length}):
                last = slice(stop - queries, stop)
                part, part_lse = launch(q[last], k[mine], v[mine], [queries], [length], scale)
                label = f"head_dim {head_dim}: last {queries} of {length}"
                assert differing(part, out[last]) == 0, label
                assert differing(part_lse, lse[:, last]) == 0, label
            start = stop
        half, _ = launch(q[:, 2:], k[:, 1:], v[:, 1:], lengths, lengths, scale)
        assert differing(half, out[:, 2:]) == 0, f"head_dim {head_dim}: half of the heads"
        # The inverse: keys in another order are the same formula and other bits.
        turned = launch(q[-1:], k[mine].flip(0), v[mine].flip(0), [1], [length], scale)[0]
        assert differing(turned, out[-1:]) > 0, "the order of the keys must show"
    assert worst < 3e-2 and worst_lse < 1e-3, (worst, worst_lse)
    return f"lengths {lengths}, head_dim {s.head_dims}, distance to fp64 {worst:.1e}"


def attention_triton(s: Setting) -> str:
    """The Triton forward: prefill, chunk and decode have the same bits; near fp64."""
    return _attention(s, launch_triton)


def attention_flash3(s: Setting) -> str:
    """FA3: prefill, chunk and decode have the same bits; near fp64."""
    return _attention(s, launch_flash3)


def public_ops(s: Setting) -> str:
    """The registered ops: fake and real agree, no hidden alias, and on a GPU they run the kernels."""
    x, weight = random(5, 256, seed=30).to(s.device), random(48, 256, seed=31).to(s.device)
    heads = random(5, 4, 32, seed=32).to(s.device)
    positions, table = torch.arange(5, device=s.device), rope_table(32, 8, 1e6).to(s.device)
    logits = random(5, 512, seed=33, dtype=FP32).to(s.device)
    statistics = launch_segment_statistics(logits, 64, 8, [64] * 8)
    calls = {
        "rms_norm": (x, weight[0], x.float(), 1e-6),
        "rope": (heads, heads[:, :2], positions, table),
        "silu_mul": (x,),
        "linear": (x, weight, weight[:, 0].contiguous(), "float32"),
        "row_linear_partial": (x, weight, 2, 2, "bfloat16"),
        "segment_statistics": (logits, 64, 8, [64] * 8),
        "combine_segments": statistics,
    }
    for name, arguments in calls.items():
        op = getattr(torch.ops.sglang_patch, name).default
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
        moved = [a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments]
        found, wanted = op(*arguments), op(*moved)
        if name not in ("linear", "row_linear_partial"):
            pairs = [(found, wanted)] if isinstance(found, torch.Tensor) else zip(found, wanted)
            for a, b in pairs:
                assert differing(a.cpu(), b) == 0, name
    return f"{', '.join(calls)}"


CHECKS: Mapping[str, Callable[[Setting], str]] = {
    check.__name__: check
    for check in (
        exponentials,
        pair_sums,
        rms_norm,
        rope,
        silu_mul,
        log_softmax,
        linear,
        row_linear_order,
        row_linear_invariance,
        attention_triton,
        attention_flash3,
        public_ops,
    )
}


def missing_requirement(name: str, device: str) -> str | None:
    """Why a check cannot run here, or None."""
    if name != "attention_flash3":
        return None
    if device == "cpu" or torch.cuda.get_device_capability()[0] != 9:
        return "not run: FA3 needs a Hopper GPU"
    try:
        import sgl_kernel.flash_attn  # noqa: F401
    except ImportError as error:
        return f"not run: {error}"
    return None
