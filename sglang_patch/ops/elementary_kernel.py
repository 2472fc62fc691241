"""exp, log and sums of `elementary.py` for Triton kernels: the same steps, so the same bits.

Every kernel that calls these is launched with `UNFUSED`: the compiler then keeps each multiply and
each add as an instruction of its own, rounded to nearest, as the reference rounds them. Divisions
and square roots are the correctly rounded ones, never Triton's faster default.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

# Launch option of every kernel whose bits are written down: no fused multiply-add anywhere in it.
UNFUSED: Final = {"enable_fp_fusion": False}

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2_HIGH = tl.constexpr(0.693359375)
_LN2_LOW = tl.constexpr(-2.12194440e-4)
_EXP_MIN = tl.constexpr(-87.33654)
_EXP_MAX = tl.constexpr(88.37626)
# 1.5 * 2**23: adding and subtracting it leaves the nearest integer, ties to even, below 2**22.
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def exp(x):
    """`elementary.exp` of an fp32 block: 0 below the smallest normal result, NaN stays NaN."""
    clamped = tl.minimum(tl.maximum(x, _EXP_MIN), _EXP_MAX)
    n = (clamped * _LOG2E + _ROUND) - _ROUND
    r = clamped - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    # The Taylor coefficients 1/k!, k from 7 to 0, by Horner's rule.
    y = tl.zeros_like(r) + 1.0 / 5040.0
    y = y * r + 1.0 / 720.0
    y = y * r + 1.0 / 120.0
    y = y * r + 1.0 / 24.0
    y = y * r + 1.0 / 6.0
    y = y * r + 0.5
    y = y * r + 1.0
    y = y * r + 1.0
    y = y * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    y = tl.where(x < _EXP_MIN, 0.0, y)
    # minimum and maximum drop a NaN, the reference's clamp keeps it.
    return tl.where(x == x, y, x)  # noqa: PLR0124


@triton.jit
def log(x):
    """`elementary.log` of an fp32 block of positive normal numbers."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    high = mantissa > 1.4142135623730951
    mantissa = tl.where(high, mantissa * 0.5, mantissa)
    n = (exponent + high.to(tl.int32)).to(tl.float32)
    s = tl.div_rn(mantissa - 1.0, mantissa + 1.0)
    z = s * s
    # 2 atanh(s): coefficients 1/(2k+1), k from 5 to 0.
    y = tl.zeros_like(z) + 1.0 / 11.0
    y = y * z + 1.0 / 9.0
    y = y * z + 1.0 / 7.0
    y = y * z + 1.0 / 5.0
    y = y * z + 1.0 / 3.0
    y = y * z + 1.0
    y = s * y * 2.0
    return n * _LN2_HIGH + (y + n * _LN2_LOW)


@triton.jit
def pair_sum(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LEVELS: tl.constexpr):
    """`elementary.pair_sum` of an fp32 block [ROWS, COLUMNS = 2**LEVELS], zero-padded -> [ROWS].

    One reduction a level, each over an axis of two: `a + b` has one value, however the compiler
    spreads the block over threads.
    """
    tl.static_assert(COLUMNS == 1 << LEVELS, "pair_sum: COLUMNS must be 2**LEVELS")
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (ROWS, COLUMNS >> (level + 1), 2)), axis=2)
    return tl.reshape(x, (ROWS,))
