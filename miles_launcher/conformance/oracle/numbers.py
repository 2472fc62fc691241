"""Number formats, and the sum that the norms and the softmax share."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"


def bf16(x: Array) -> Array:
    """`x` rounded to bf16, ties to even, as fp32 numbers. NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    kept = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + kept) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32)).astype(np.float32)


def rounded(x: Array, dtype: str) -> Array:
    """`x` in the format called `dtype`: bfloat16 or float32."""
    assert dtype in ("bfloat16", "float32"), dtype
    return bf16(x) if dtype == "bfloat16" else x


def pair_tree(x: Array) -> Array:
    """Sum over the last axis: neighbours in pairs, then the pairs' sums in pairs, to the end.

    An odd one out waits for a partner that is zero.
    """
    assert x.dtype == np.float32 and x.shape[-1] > 0
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = np.concatenate((x, np.zeros_like(x[..., :1])), axis=-1)
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def running_sum(x: Array) -> Array:
    """Sum over the last axis from left to right: an order that is not the pair tree."""
    total = np.zeros_like(x[..., 0])
    for i in range(x.shape[-1]):
        total = total + x[..., i]
    return total
