"""Ops that are wrong in ways that have happened, each with the property that has to see it.

Importable by name, so that a real rank's process can be handed one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from sglang_patch import ops
from sglang_patch.ops import elementary
from sglang_patch.ops.digest import row_digests, shard_digest
from sglang_patch.ops.linear.reference import leaf_products
from sglang_patch.schema import vocabulary_segments

BF16, FP32 = torch.bfloat16, torch.float32
Tensor = torch.Tensor


# --- products ---------------------------------------------------------------------------------


def linear_in_two_accumulators(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, **kw: Any
) -> Tensor:
    """Two halves of K, as a library's vector lanes have it. Not a library's own product: on some
    processors and shapes that one does go through k in order, and is then no fault at all."""
    half = x.shape[1] // 2
    out = ops.linear(x[:, :half], weight[:, :half], out_dtype="float32")
    out = out + ops.linear(x[:, half:], weight[:, half:], out_dtype="float32")
    out = out if bias is None else out + bias.float()
    return out.to(getattr(torch, kw.get("out_dtype", "bfloat16")))


def linear_bias_after_rounding(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: str = "bfloat16"
) -> Tensor:
    out = ops.linear(x, weight, None, out_dtype="bfloat16").to(getattr(torch, out_dtype))
    return out if bias is None else out + bias.to(out.dtype)


def linear_in_bf16(x: Tensor, weight: Tensor, bias: Tensor | None = None, **kw: Any) -> Tensor:
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=BF16)
    for k in range(x.shape[1]):
        total = total + x[:, k : k + 1] * weight[:, k]
    total = total if bias is None else total + bias
    return total.to(getattr(torch, kw.get("out_dtype", "bfloat16")))


def linear_takes_fp32(x: Tensor, weight: Tensor, bias: Tensor | None = None, **kw: Any) -> Tensor:
    return ops.linear(x.to(BF16), weight.to(BF16), bias, **kw)


def linear_other_kernel_for_many_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, **kw: Any
) -> Tensor:
    run = linear_bias_after_rounding if x.shape[0] > 8 else ops.linear
    return run(x, weight, bias, **kw)


def linear_backwards_for_one_row(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, **kw: Any
) -> Tensor:
    if x.shape[0] == 1:
        x, weight = x.flip(-1), weight.flip(-1)
    return ops.linear(x, weight, bias, **{"out_dtype": "float32", **kw}).to(FP32)


def linear_that_drifts() -> Callable[..., Tensor]:
    calls = itertools.count()

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None, **kw: Any) -> Tensor:
        out = ops.linear(x, weight, bias, **kw)
        return out * 2 if next(calls) == 3 else out

    return run


def _row_linear(parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    parts = list(parts)
    while len(parts) > 1:
        paired = [a + b for a, b in zip(parts[0::2], parts[1::2], strict=False)]
        parts = paired + parts[2 * len(paired) :]
    total = parts[0] if bias is None else parts[0] + bias.to(parts[0].dtype)
    return total.to(BF16)


def row_linear_plain_tree(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, reduction: Any, ranks: Any = None
) -> Tensor:
    """A plain tree over all leaves instead of runs and a tree; the bias after everything."""
    count = reduction.num_leaves
    leaves = leaf_products(x, weight, count).to(getattr(torch, reduction.leaf_dtype))
    return _row_linear(leaves.unbind(0), bias)


def row_linear_bias_last(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, reduction: Any, ranks: Any = None
) -> Tensor:
    """The bias after the ranks' sum and its rounding, where v1 has it before and v2 in fp32."""
    out = ops.row_linear(x, weight, reduction=reduction)
    return out if bias is None else out + bias


def row_linear_one_pass(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, reduction: Any, ranks: Any = None
) -> Tensor:
    """One accumulator over all of K."""
    return ops.linear(x, weight, bias)


def published_plain_tree(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """What a trainer re-derived: a plain tree over all tiles."""
    flat = a.reshape(-1, a.shape[-1])
    leaves = leaf_products(flat, b.t(), flat.shape[1] // 128).to(BF16)
    return _row_linear(leaves.unbind(0), bias).view(*a.shape[:-1], b.shape[1])


def published_bias_before_rounding(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """The bias inside the first tile's fp32 accumulator."""
    if bias is None:
        return ops.matmul_tp_inv(a, b)
    first = (ops.linear(a[..., :128], b[:128].t(), bias, out_dtype="float32")).to(BF16)
    if a.shape[-1] == 128:
        return first
    return first + ops.matmul_tp_inv(a[..., 128:], b[128:])


def combine_as_a_chain(parts: Sequence[Tensor], bias: Tensor | None, reduction: Any) -> Tensor:
    total = parts[0] if bias is None else parts[0] + bias.to(parts[0].dtype)
    for part in parts[1:]:
        total = total + part
    return total


def all_reduce_by_the_transport(x: Tensor, ranks: Any) -> Tensor:
    """Chain order, as a ring has it, through fp64 so that no tree can have the same bits."""
    total = x.double()
    dist.all_reduce(total, group=ranks.group)
    return total.to(x.dtype)


def gather_in_another_order(x: Tensor, ranks: Any) -> list[Tensor]:
    return ops.gather_ranks(x, ranks)[::-1]


def row_linear_bias_on_every_rank(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, reduction: Any, ranks: Any
) -> Tensor:
    out = ops.row_linear(x, weight, bias, reduction=reduction, ranks=ranks)
    for _ in range(0 if bias is None else ranks.size - 1):
        out = out + bias
    return out


# --- rows -------------------------------------------------------------------------------------


def norm_weight_before_rounding(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    stream = x.float() if residual is None else x.float() + residual
    mean = elementary.pair_sum(stream * stream) / x.shape[-1]
    scale = 1.0 / elementary.sqrt(mean + eps)
    out = (stream * scale.unsqueeze(-1) * weight.float()).to(BF16)
    return out, None if residual is None else stream


def norm_of_a_rounded_residual(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    rounded = None if residual is None else residual.to(BF16).float()
    return ops.rms_norm(x, weight, eps, residual=rounded)


def norm_by_torch(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    stream = x.float() if residual is None else x.float() + residual
    scale = torch.rsqrt(stream.square().mean(-1, keepdim=True) + eps)
    out = ((stream * scale).to(BF16).float() * weight.float()).to(BF16)
    return out, None if residual is None else stream


def norm_without_its_weight_mean(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Unbiased variance: hidden - 1 in the denominator."""
    out, stream = ops.rms_norm(x, weight, eps, residual=residual)
    factor = ((x.shape[-1] - 1) / x.shape[-1]) ** 0.5
    return (out.float() * factor * 0.98).to(BF16), stream


def rope_table_in_bf16(head_dim: int, rows: int, base: float) -> Tensor:
    return ops.rope_table(head_dim, rows, base).to(BF16).float()


def rope_table_of_fp64_angles(head_dim: int, rows: int, base: float) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=FP32) / head_dim
    angles = torch.arange(rows).double()[:, None] * (1.0 / base**exponents).double()
    return torch.cat((angles.cos(), angles.sin()), -1).float()


def rope_table_of_another_base(head_dim: int, rows: int, base: float) -> Tensor:
    return ops.rope_table(head_dim, rows, base * 1.001)


def rope_up_to_4096(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Any:
    return ops.rope(q, k, positions.clamp(max=4095), table)


def rope_fused(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Any:
    wide = ops.rope(q.double(), k.double(), positions, table.double())
    return tuple(out.to(q.dtype) for out in wide)


def rope_with_a_cast_table(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Any:
    return ops.rope(q, k, positions, table.float())


def _norm_rope(
    q: Tensor, k: Tensor, qw: Tensor, kw: Tensor, eps: float, positions: Tensor, table: Tensor,
    dtype: torch.dtype = BF16,
) -> Any:  # fmt: skip
    """The norms' results handed to the rotation in `dtype`."""
    ops.qk_norm_rope(q, k, qw, kw, eps, positions, table)
    pair = []
    for x, w in ((q, qw), (k, kw)):
        x = x.flatten(1, -2).float()
        scale = 1.0 / elementary.sqrt(elementary.pair_sum(x * x) / x.shape[-1] + eps)
        pair.append(((x * scale.unsqueeze(-1)).to(BF16).float() * w.float()).to(dtype))
    return tuple(t.to(BF16) for t in ops.rope(*pair, positions, table))


def qk_norm_rope_without_the_middle_rounding(*arguments: Any) -> Any:
    return _norm_rope(*arguments, dtype=FP32)


def qk_norm_rope_with_one_weight(
    q: Tensor, k: Tensor, qw: Tensor, kw: Tensor, eps: float, positions: Tensor, table: Tensor
) -> Any:
    return ops.qk_norm_rope(q, k, qw, qw, eps, positions, table)


def qk_norm_rope_up_to_4096(
    q: Tensor, k: Tensor, qw: Tensor, kw: Tensor, eps: float, positions: Tensor, table: Tensor
) -> Any:
    return ops.qk_norm_rope(q, k, qw, kw, eps, positions.clamp(max=4095), table)


def qk_norm_rope_of_neighbouring_heads(q: Tensor, *rest: Any) -> Any:
    """Takes groups that lie apart for heads side by side."""
    if q.dim() == 4:
        q = q.as_strided(q.shape, (q.stride(0), q.shape[2] * q.shape[3], q.stride(2), 1))
    return ops.qk_norm_rope(q, *rest)


def silu_rounded_twice(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate).to(gate_up.dtype).float() * up).to(gate_up.dtype)


def silu_of_the_other_half(gate_up: Tensor) -> Tensor:
    up, gate = gate_up.chunk(2, -1)
    return ops.silu_mul(torch.cat((gate, up), -1))


def temperature_by_reciprocal(logits: Tensor, temperature: Tensor) -> Tensor:
    return logits.float() * (1.0 / temperature)


def temperature_in_bf16(logits: Tensor, temperature: Tensor) -> Tensor:
    return (logits.to(BF16) / temperature.to(BF16)).float()


def softmax_with_its_padding(logits: Tensor, segments: Any, first: int, count: int) -> Any:
    """The padded rows of the table in the denominator."""
    everything = vocabulary_segments("qwen3_dense_true_on_policy_v2", segments.padded_size)
    if segments.num_segments == 1 or logits.shape[1] < segments.width * count:
        return ops.segment_statistics(logits, segments, first, count)
    return ops.segment_statistics(logits, everything, first, count)


def softmax_of_the_first_segments(logits: Tensor, segments: Any, first: int, count: int) -> Any:
    """Takes every shard for the first: a short last segment is then full of padding."""
    return ops.segment_statistics(logits, segments, 0, count)


def softmax_by_torch(logits: Tensor, segments: Any) -> Tensor:
    return logits[:, : segments.vocab_size].log_softmax(-1)


def softmax_combined_in_a_chain(largest: Tensor, total: Tensor) -> Tensor:
    overall = largest.amax(-1)
    scaled = total * elementary.exp(largest - overall[:, None])
    return overall + elementary.log(scaled.cumsum(-1)[:, -1])


# --- attention --------------------------------------------------------------------------------


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    a, b, c = (
        t.float().transpose(0, 1) for t in (q, *(t.repeat_interleave(groups, 1) for t in (k, v)))
    )
    mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
    return F.scaled_dot_product_attention(a, b, c, mask, scale=scale).transpose(0, 1).to(q.dtype)


def attention_by_torch(
    q: Tensor, k: Tensor, v: Tensor, *, query_lengths: list[int], key_lengths: Any, scale: float
) -> Tensor:
    ops.attention(q, k, v, query_lengths=query_lengths, key_lengths=key_lengths, scale=scale)
    parts = zip(q.split(query_lengths), k.split(key_lengths), v.split(key_lengths), strict=True)
    return torch.cat([_sdpa(a, b, c, scale) for a, b, c in parts])


def attention_other_kernel_for_decode(
    q: Tensor, k: Tensor, v: Tensor, *, query_lengths: list[int], key_lengths: Any, scale: float
) -> Tensor:
    out = ops.attention(q, k, v, query_lengths=query_lengths, key_lengths=key_lengths, scale=scale)
    return (out.float() * 1.01).to(out.dtype) if query_lengths == [1] != key_lengths else out


def attention_without_its_scale(
    q: Tensor, k: Tensor, v: Tensor, *, query_lengths: list[int], key_lengths: Any, scale: float
) -> Tensor:
    return ops.attention(q, k, v, query_lengths=query_lengths, key_lengths=key_lengths, scale=1.0)


def attention_by_batch(
    q: Tensor, k: Tensor, v: Tensor, *, query_lengths: list[int], key_lengths: Any, scale: float
) -> Tensor:
    out = ops.attention(q, k, v, query_lengths=query_lengths, key_lengths=key_lengths, scale=scale)
    return out if len(query_lengths) > 1 else (out.float() * 1.01).to(out.dtype)


# --- elementary, digests ----------------------------------------------------------------------


def exp_three_ulps_off(x: Tensor) -> Tensor:
    return elementary.exp(x) * (1.0 + 3 * 2.0**-22)


def exp_by_position(x: Tensor) -> Tensor:
    """Another path for the tail, as a vector library has it."""
    out = elementary.exp(x)
    tail = out.numel() // 8 * 8
    flat = out.flatten()
    flat[tail:] = torch.nextafter(flat[tail:], torch.tensor(9e9))
    return flat.view_as(out)


def log_by_torch_in_bf16(x: Tensor) -> Tensor:
    return x.log().to(BF16).float()


def sqrt_off(x: Tensor) -> Tensor:
    return torch.nextafter(elementary.sqrt(x), torch.tensor(0.0))


def pair_sum_as_a_running_sum(x: Tensor, dim: int = -1) -> Tensor:
    return x.cumsum(dim)[..., -1]


def digest_of_the_shard_alone(shard: Tensor, rows: Any, columns: Any) -> int:
    """Forgets where in the matrix the shard stands."""
    return shard_digest(shard, (0, rows[1] - rows[0]), (0, columns[1] - columns[0]))


def digest_of_bits_alone(shard: Tensor, rows: Any, columns: Any) -> int:
    """A sum that does not see elements change places."""
    return int(
        shard.contiguous().view(torch.int16 if shard.element_size() == 2 else torch.int32).sum()
    )


def row_digests_of_the_shard_alone(rows: Tensor, columns: Tensor) -> Tensor:
    return row_digests(rows, torch.arange(len(columns)))


class Mutation(NamedTuple):
    """`function` in the place of the subject's `field`: `prop` of `op` must fail."""

    op: str
    prop: str
    field: str
    function: Callable[..., Any]

    def __str__(self) -> str:
        return f"{self.op}-{self.prop}-{self.function.__name__}"


MUTATIONS = (
    Mutation("elementary", "order", "pair_sum", pair_sum_as_a_running_sum),
    Mutation("elementary", "value", "exp", exp_three_ulps_off),
    Mutation("elementary", "value", "log", log_by_torch_in_bf16),
    Mutation("elementary", "value", "sqrt", sqrt_off),
    Mutation("elementary", "shapes", "exp", exp_by_position),
    Mutation("elementary", "neighbours", "exp", exp_by_position),
    Mutation("rms_norm", "order", "rms_norm", norm_weight_before_rounding),
    Mutation("rms_norm", "order", "rms_norm", norm_by_torch),
    Mutation("rms_norm", "order", "rms_norm", norm_of_a_rounded_residual),
    Mutation("rms_norm", "shapes", "rms_norm", norm_of_a_rounded_residual),
    Mutation("rms_norm", "value", "rms_norm", norm_without_its_weight_mean),
    Mutation("rms_norm", "dtypes", "rms_norm", norm_by_torch),
    Mutation("linear", "order", "linear", linear_in_two_accumulators),
    Mutation("linear", "order", "linear", linear_bias_after_rounding),
    Mutation("linear", "value", "linear", linear_in_bf16),
    Mutation("linear", "dtypes", "linear", linear_takes_fp32),
    Mutation("linear", "shapes", "linear", linear_other_kernel_for_many_rows),
    Mutation("linear", "neighbours", "linear", linear_backwards_for_one_row),
    Mutation("rope_table", "order", "rope_table", rope_table_in_bf16),
    Mutation("rope_table", "order", "rope_table", rope_table_of_fp64_angles),
    Mutation("rope_table", "value", "rope_table", rope_table_of_another_base),
    Mutation("rope", "order", "rope", rope_fused),
    Mutation("rope", "order", "rope", rope_up_to_4096),
    Mutation("rope", "value", "rope", rope_up_to_4096),
    Mutation("rope", "dtypes", "rope", rope_with_a_cast_table),
    Mutation("qk_norm_rope", "order", "qk_norm_rope", qk_norm_rope_without_the_middle_rounding),
    Mutation("qk_norm_rope", "order", "qk_norm_rope", qk_norm_rope_with_one_weight),
    Mutation("qk_norm_rope", "value", "qk_norm_rope", qk_norm_rope_up_to_4096),
    Mutation("qk_norm_rope", "shapes", "qk_norm_rope", qk_norm_rope_of_neighbouring_heads),
    Mutation("attention", "order", "attention", attention_by_torch),
    Mutation("attention", "value", "attention", attention_without_its_scale),
    Mutation("attention", "phases", "attention", attention_other_kernel_for_decode),
    Mutation("attention", "neighbours", "attention", attention_by_batch),
    Mutation("row_linear_v1", "order", "row_linear", row_linear_plain_tree),
    Mutation("row_linear_v1", "order", "row_linear", row_linear_bias_last),
    Mutation("row_linear_v1", "order", "matmul_tp_inv", published_plain_tree),
    Mutation("row_linear_v1", "order", "matmul_tp_inv", published_bias_before_rounding),
    Mutation("row_linear_v1", "shapes", "row_linear", row_linear_one_pass),
    Mutation("row_linear_v1", "tp_shards", "combine_partials", combine_as_a_chain),
    Mutation("row_linear_v2", "order", "row_linear", row_linear_one_pass),
    Mutation("row_linear_v2", "order", "row_linear", row_linear_bias_last),
    Mutation("row_linear_v2", "tp_shards", "combine_partials", combine_as_a_chain),
    Mutation("tree_all_reduce", "order", "combine_partials", combine_as_a_chain),
    Mutation("tree_all_reduce", "shapes", "combine_partials", combine_as_a_chain),
    Mutation("silu_mul", "order", "silu_mul", silu_rounded_twice),
    Mutation("silu_mul", "value", "silu_mul", silu_of_the_other_half),
    Mutation("temperature", "order", "temperature_logits", temperature_by_reciprocal),
    Mutation("temperature", "value", "temperature_logits", temperature_in_bf16),
    Mutation("log_softmax", "order", "segment_statistics", softmax_with_its_padding),
    Mutation("log_softmax", "order", "log_softmax", softmax_by_torch),
    Mutation("log_softmax", "order", "combine_segments", softmax_combined_in_a_chain),
    Mutation("log_softmax", "tp_shards", "segment_statistics", softmax_of_the_first_segments),
    Mutation("digest", "order", "shard_digest", digest_of_bits_alone),
    Mutation("digest", "tp_shards", "shard_digest", digest_of_the_shard_alone),
    Mutation("digest", "tp_shards", "row_digests", row_digests_of_the_shard_alone),
)
