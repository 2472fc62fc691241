"""Products over K: one accumulator a leaf, and the two published ways to add the leaves.

Written from the specification, not from the schema: the run length, the tree and the place of the
bias are worked out here a second time, which is what makes the comparison one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .numbers import Array, bf16, rounded

TILE = 128


def leaves(x: Array, weight: Array, count: int) -> list[Array]:
    """x [M, K], weight [N, K]: `count` equal ranges of K, each one fp32 accumulator [M, N] from
    zero, k increasing, product and sum rounded one after the other."""
    width = x.shape[1] // count
    assert width * count == x.shape[1]
    # All leaves advance together: they do not meet, so one step of k serves them all.
    a = x.reshape(x.shape[0], count, width).transpose(2, 1, 0)[..., None]
    b = weight.reshape(weight.shape[0], count, width).transpose(2, 1, 0)[:, :, None, :]
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    total = np.zeros((count, x.shape[0], weight.shape[0]), dtype=np.float32)
    for k in range(width):
        total = total + a[k] * b[k]
    return list(total)


def linear(x: Array, weight: Array, bias: Array | None, dtype: str) -> Array:
    """One accumulator over all of K, the bias in fp32, one rounding to `dtype`."""
    (total,) = leaves(x, weight, 1)
    return rounded(total if bias is None else total + bias, dtype)


def tree(parts: Sequence[Array], dtype: str) -> Array:
    """Stride-doubling binary tree: every second adds its neighbour, then every fourth, ..."""
    parts = list(parts)
    assert len(parts) & (len(parts) - 1) == 0 and parts, len(parts)
    stride = 1
    while stride < len(parts):
        for i in range(0, len(parts), 2 * stride):
            parts[i] = rounded(parts[i] + parts[i + stride], dtype)
        stride *= 2
    return parts[0]


def chain(parts: Sequence[Array], dtype: str) -> Array:
    """Left to right: where it gives the bits of another order, the inputs show nothing."""
    total = parts[0]
    for part in parts[1:]:
        total = rounded(total + part, dtype)
    return total


def plain_tree(parts: Sequence[Array], dtype: str) -> Array:
    """Neighbours in pairs at every level, an odd one carried over: not what was published."""
    parts = list(parts)
    while len(parts) > 1:
        paired = [rounded(a + b, dtype) for a, b in zip(parts[0::2], parts[1::2], strict=False)]
        parts = paired + parts[2 * len(paired) :]
    return parts[0]


def first_of(tiles: int) -> int:
    """How many consecutive tiles are added left to right before the tree."""
    first = tiles
    while first > 2 and first % 2 == 0:
        first //= 2
    return first


def runs_then_tree(parts: Sequence[Array], dtype: str) -> Array:
    """The published order of K tiles: runs of `first_of` tiles, then the tree over the runs."""
    first = first_of(len(parts))
    runs = [chain(parts[i : i + first], dtype) for i in range(0, len(parts), first)]
    return tree(runs, dtype)


def row_linear_v1(x: Array, weight: Array, bias: Array | None, rollout_tp: int) -> Array:
    """Contract v1 over the whole K as `rollout_tp` rollout ranks add it.

    128-wide tiles where a rank's K is a multiple of 128, otherwise one product a rank; bf16
    throughout; the bias joins the first rank's sum before the ranks are added.
    """
    width = x.shape[1] // rollout_tp
    parts = []
    for rank in range(rollout_tp):
        cut = slice(rank * width, (rank + 1) * width)
        tiles = width // TILE if width % TILE == 0 else 1
        parts.append(
            runs_then_tree([bf16(p) for p in leaves(x[:, cut], weight[:, cut], tiles)], "bfloat16")
        )
    if bias is not None:
        parts[0] = bf16(parts[0] + bias)
    return tree(parts, "bfloat16")


def row_linear_v2(x: Array, weight: Array, bias: Array | None, segments: int) -> Array:
    """Contract v2 before its one rounding: equal segments of K, an fp32 tree, the bias in fp32 at
    the root."""
    total = tree(leaves(x, weight, segments), "float32")
    return total if bias is None else total + bias
