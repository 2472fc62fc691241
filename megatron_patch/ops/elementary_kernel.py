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
# The interpreter runs no instruction of a GPU.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
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
def exp_nonpositive(x):
    """`exp` of numbers not above zero, in fewer instructions; of a NaN something finite."""
    clamped = tl.maximum(x, _EXP_MIN)
    shifted = clamped * _LOG2E + _ROUND
    n = shifted - _ROUND
    # n * _LN2_HIGH is exact, so that the fused form rounds the same difference once.
    r = tl.fma(n, -_LN2_HIGH, clamped)
    r = r - n * _LN2_LOW
    y = tl.zeros_like(r) + 1.0 / 5040.0
    y = y * r + 1.0 / 720.0
    y = y * r + 1.0 / 120.0
    y = y * r + 1.0 / 24.0
    y = y * r + 1.0 / 6.0
    y = y * r + 0.5
    y = y * r + 1.0
    y = y * r + 1.0
    # The low bits of `shifted` are n.
    power = (shifted.to(tl.int32, bitcast=True) << 23) + (127 << 23)
    y = y * power.to(tl.float32, bitcast=True)
    return tl.where(x < _EXP_MIN, 0.0, y)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) of an fp32 block, e = e^-|x|: `1 / (1 + e)` or `e / (1 + e)`, each operation
    correctly rounded; of a NaN something finite.

    The quotient is an estimate and its exact remainder over the denominator (Markstein, 1990),
    without the branches of the general division: a denominator from 1 to 2 and a numerator up to
    1 leave no result out of range. Compared with the general division for every e on a GPU.
    """
    e = exp_nonpositive(-tl.abs(x))
    numerator = tl.where(x >= 0, 1.0, e)
    denominator = 1.0 + e
    if _INTERPRETED:
        inverse = 1.0 / denominator
    else:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [denominator], tl.float32, is_pure=True, pack=1
        )
    estimate = numerator * inverse
    remainder = tl.fma(-estimate, denominator, numerator)
    return tl.fma(remainder, inverse, estimate)


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


@triton.jit
def tree_sum(parts, COUNT: tl.constexpr, LEVELS: tl.constexpr):
    """`elementary.pair_sum` over a tuple of COUNT blocks, COUNT at most 2**LEVELS: neighbours in
    pairs. An odd one out has zero for a partner, which changes no bit of a sum of squares."""
    for level in tl.static_range(LEVELS):
        sums = ()
        for i in tl.static_range((COUNT + (1 << level) - 1) >> level):
            if i % 2 == 0:
                if i + 1 < (COUNT + (1 << level) - 1) >> level:
                    sums = sums + (parts[i] + parts[i + 1],)  # type: ignore[assignment]
                else:
                    sums = sums + (parts[i],)  # type: ignore[assignment]
        parts = sums
    return parts[0]
