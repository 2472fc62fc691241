"""The addition of contract v1's consumers, on every pair of numbers. Imports Triton."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sglang_patch.ops.linear.kernel_leaves import plus


@gluon.jit
def _sums_kernel(counts, BLOCK: gl.constexpr):
    """How many sums of bf16 number program_id and every other differ from the fp32 sum, rounded."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    left = gl.zeros([BLOCK], gl.int32, layout=layout) + gl.program_id(0)
    wrong = gl.zeros([BLOCK], gl.int32, layout=layout)
    for start in range(0, 65536, BLOCK):
        right = start + gl.arange(0, BLOCK, layout=layout)
        # Each number is the lower half of one word and the upper half of another.
        pairs = plus(left | (left << 16), right | (right << 16))
        wide = (left << 16).to(gl.float32, bitcast=True) + (right << 16).to(
            gl.float32, bitcast=True
        )
        bits = wide.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
        wrong += (pairs != (bits | (bits << 16))).to(gl.int32)
    gl.store(counts + gl.program_id(0), gl.sum(wrong, 0))


def compare_sums() -> int:
    """The consumers' addition on all 2**32 pairs of bf16 numbers; returns how many.

    Raises `AssertionError` where a sum has other bits than the fp32 sum rounded to bf16.
    """
    counts = torch.full((65536,), -1, dtype=torch.int32, device="cuda")
    _sums_kernel[(65536,)](counts, BLOCK=4096, num_warps=4)
    wrong = counts[counts != 0]
    assert not wrong.numel(), f"bf16 sums differ from the fp32 sum, rounded: {wrong.sum()} of 2**32"
    return 1 << 32
