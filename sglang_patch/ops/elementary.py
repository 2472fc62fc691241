"""exp, log, square roots and sums whose bits depend on the values alone.

PyTorch's CPU `exp` takes another code path for the tail of a tensor than for its vector body, `sum`
associates by shape, and `sqrt` is not correctly rounded (of 4 million numbers 0.6 % were one ulp
off NumPy's IEEE root). A row would then get other bits beside other neighbours, in another shard or
on another processor. These use only `+ - * /`, rounding and bit moves, which IEEE 754 defines
exactly, one torch call each so that no compiler fuses a multiply into an add: the same bits at
every position, shape, thread count and processor.
"""

from __future__ import annotations

import torch

_LOG2E = 1.4426950408889634
# ln 2 in two parts; the first has few mantissa bits, so that n * _LN2_HIGH is exact (Cody & Waite).
_LN2_HIGH = {torch.float32: 0.693359375, torch.float64: 0.693147180369123816490}
_LN2_LOW = {torch.float32: -2.12194440e-4, torch.float64: 1.90821492927058770002e-10}
_TERMS = {torch.float32: 8, torch.float64: 14}
# Below these the result is not a normal number: flushed to zero, on every processor.
_EXP_MIN = {torch.float32: -87.33654, torch.float64: -708.3964}
_EXP_MAX = {torch.float32: 88.37626, torch.float64: 709.4361}
_MANTISSA_BITS = {torch.float32: 23, torch.float64: 52}
_BIAS = {torch.float32: 127, torch.float64: 1023}
_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


def _power_of_two(n: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    exponent = (n.to(_INTEGER[dtype]) + _BIAS[dtype]) << _MANTISSA_BITS[dtype]
    return exponent.view(dtype)


def exp(x: torch.Tensor) -> torch.Tensor:
    """e to the x, elementwise, fp32 or fp64 (within two ulps); 0 below the
    smallest normal number.

    Finite arguments up to 88 (fp32) or 709 (fp64), and -inf. NaN stays NaN.
    """
    dtype = x.dtype
    clamped = x.clamp(_EXP_MIN[dtype], _EXP_MAX[dtype])
    n = (clamped * _LOG2E).round()
    r = clamped - n * _LN2_HIGH[dtype]
    r = r - n * _LN2_LOW[dtype]
    factorial = 1.0
    coefficients = [1.0]
    for k in range(1, _TERMS[dtype]):
        factorial *= k
        coefficients.append(1.0 / factorial)
    y = torch.full_like(r, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        y.mul_(r).add_(c)
    y.mul_(_power_of_two(torch.nan_to_num(n), dtype))
    return torch.where(x < _EXP_MIN[dtype], torch.zeros_like(y), y)


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive normal numbers, elementwise, fp32 or fp64 (within 3 ulps)."""
    dtype = x.dtype
    bits = x.view(_INTEGER[dtype])
    exponent = (bits >> _MANTISSA_BITS[dtype]) - _BIAS[dtype]
    mantissa = (bits - (exponent << _MANTISSA_BITS[dtype])).view(dtype)
    high = mantissa > 1.4142135623730951
    mantissa = torch.where(high, mantissa * 0.5, mantissa)
    n = (exponent + high.to(exponent.dtype)).to(dtype)
    # log(m) = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.172
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    terms = 6 if dtype == torch.float32 else 12
    y = torch.full_like(z, 1.0 / (2 * terms - 1))
    for k in range(terms - 2, -1, -1):
        y.mul_(z).add_(1.0 / (2 * k + 1))
    y = s * y * 2.0
    return n * _LN2_HIGH[dtype] + (y + n * _LN2_LOW[dtype])


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded square root of fp32 numbers, elementwise; fp64 as PyTorch gives it.

    Taken in fp64 and rounded once. The root of a 24-bit number is never within 2**-51 (relative) of
    the middle between two fp32 numbers, and the fp64 root is closer to the truth than that, so the
    second rounding cannot go the wrong way.
    """
    return torch.sqrt(x.to(torch.float64)).to(x.dtype)


def pair_sum(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Sum over `dim` as a balanced tree over neighbours: `((x0+x1)+(x2+x3))+...`.

    The dimension is extended with zeros to a power of two; more zeros change no bit, so a row has
    the same sum whatever length it was padded to.
    """
    x = x.movedim(dim, -1)
    length = x.shape[-1]
    if length == 0:
        return x.new_zeros(x.shape[:-1])
    padded = 1 << (length - 1).bit_length()
    if padded != length:
        x = torch.nn.functional.pad(x, (0, padded - length))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]
