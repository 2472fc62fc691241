"""Norm, rotation, SiLU-mul, softmax and attention, row by row, in the written order.

`exp` and `log` are handed in: they are ops with checks of their own, against fp64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .numbers import Array, bf16, pair_tree, rounded

Elementwise = Callable[[Array], Array]
ONE = np.float32(1.0)


def rms_norm(x: Array, weight: Array, residual: Array | None, eps: float) -> tuple[Array, Array]:
    """(output in bf16, fp32 stream): the variance is a pair tree over hidden; the normalised value
    is rounded to bf16 before the fp32 weight multiplies it."""
    stream = x if residual is None else x + residual
    mean = pair_tree(stream * stream) / np.float32(x.shape[-1])
    scale = ONE / np.sqrt(mean + np.float32(eps))
    normalised = bf16(stream * scale[..., None])
    return bf16(normalised * weight), stream


def rope(x: Array, cos: Array, sin: Array, dtype: str) -> Array:
    """x [tokens, heads, dim], cos and sin [tokens, dim / 2]: halves; four products and two sums,
    each rounded to fp32, then one rounding."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    c, s = cos[:, None, :], sin[:, None, :]
    left = (a * c) - (b * s)
    right = (b * c) + (a * s)
    return rounded(np.concatenate((left, right), axis=-1), dtype)


def silu_mul(gate_up: Array, exp: Elementwise, dtype: str) -> Array:
    """gate / (1 + e^-gate) * up, without a large exponential: three fp32 operations after the
    sigmoid's quotient, one rounding."""
    width = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :width], gate_up[..., width:]
    e = exp(-np.abs(gate))
    sigmoid = np.where(gate >= 0, ONE, e) / (ONE + e)
    return rounded((gate * sigmoid) * up, dtype)


def segment_width(vocab_size: int) -> int:
    """Columns of one of the eight segments: 64 * ceil(V / 512)."""
    return 64 * ((vocab_size + 511) // 512)


def statistics(
    logits: Array, vocab_size: int, width: int, segments: int, exp: Elementwise
) -> tuple[Array, Array]:
    """(maximum, sum of exp(logit - maximum)) of each segment over its real columns; an empty
    segment has -inf and 0. logits [rows, >= vocab_size] -> two [rows, segments]."""
    rows = logits.shape[0]
    largest = np.full((rows, segments), -np.inf, dtype=np.float32)
    total = np.zeros((rows, segments), dtype=np.float32)
    for segment in range(segments):
        real = logits[:, segment * width : min((segment + 1) * width, vocab_size)]
        if real.shape[1]:
            largest[:, segment] = real.max(axis=1)
            total[:, segment] = pair_tree(exp(real - largest[:, segment, None]))
    return largest, total


def combined(largest: Array, total: Array, exp: Elementwise, log: Elementwise) -> Array:
    """log of the whole sum: segments scaled to the overall maximum, added as a pair tree."""
    overall = largest.max(axis=1)
    scaled = total * exp(largest - overall[:, None])
    return overall + log(pair_tree(scaled))


def weighted(logits: Array, vocab_size: int, width: int, segments: int, exp: Elementwise) -> Array:
    """Sum of exp(d) * d over each segment's real columns, d = logit - maximum; 0 where empty."""
    out = np.zeros((logits.shape[0], segments), dtype=np.float32)
    for segment in range(segments):
        real = logits[:, segment * width : min((segment + 1) * width, vocab_size)]
        if real.shape[1]:
            distance = real - real.max(axis=1, keepdims=True)
            out[:, segment] = pair_tree(exp(distance) * distance)
    return out


def entropy(
    largest: Array, total: Array, weighted: Array, exp: Elementwise, log: Elementwise
) -> Array:
    """log of the whole sum minus the mean exponent, both relative to the overall maximum."""
    overall = largest.max(axis=1)
    distance = np.where(np.isinf(largest), np.float32(0), largest - overall[:, None])
    factor = exp(largest - overall[:, None])
    whole = pair_tree(total * factor)
    return log(whole) - pair_tree(factor * (weighted + total * distance)) / whole


def logits_gradient(
    scaled: Array,
    targets: Array,
    normaliser: Array,
    weight: Array,
    vocab_size: int,
    exp: Elementwise,
) -> Array:
    """(1 at the target - softmax) * weight, 0 in the padding; weight: gradient / temperature."""
    out = np.zeros_like(scaled)
    real = scaled[:, :vocab_size]
    out[:, :vocab_size] = -(exp(real - normaliser[:, None]) * weight[:, None])
    rows = np.arange(len(targets))
    out[rows, targets] = out[rows, targets] + weight
    return out


def attention(
    query: Array, key: Array, value: Array, scale: float, exp: Elementwise, dtype: str
) -> Array:
    """One sequence, causal; query [queries, heads, dim], key and value [keys, kv_heads, dim].

    A query sees its own keys alone: scores over dim and the weighted values over keys are summed
    in increasing order from zero, the weights as a pair tree; the quotient is taken at the end.
    """
    queries, heads, dim = query.shape
    keys, kv_heads, _ = key.shape
    out = np.zeros_like(query)
    for head in range(heads):
        k, v = (t[:, head // (heads // kv_heads)] for t in (key, value))
        scores = np.zeros((queries, keys), dtype=np.float32)
        for d in range(dim):
            scores = scores + query[:, head, d, None] * k[None, :, d]
        scores = scores * np.float32(scale)
        for i in range(queries):
            seen = keys - queries + i + 1
            weights = exp(scores[i, :seen] - scores[i, :seen].max())
            total = np.zeros(dim, dtype=np.float32)
            for j in range(seen):
                total = total + weights[j] * v[j]
            out[i, head] = total / pair_tree(weights)
    return rounded(out, dtype)
