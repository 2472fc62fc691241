"""Make Triton's interpreter right in bf16 and `tl.fma`, and its `tl.dot` one written order.

The interpreter of Triton 3.6 stores bf16 as uint16: it truncates fp32 -> bf16 instead of rounding,
and multiplies the raw integers in `tl.dot`; its fused multiply-add rounds twice. All are repaired
here for tests, the first with PyTorch's conversion. The repaired dot adds to its accumulator over
increasing k, multiply and add rounded separately, which is the reference's order: so kernels can be
compared with the reference bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_original_cast = InterpreterBuilder.cast_impl


def _to_float(data: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    if dtype.scalar == tl.bfloat16:
        bits = data.astype(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32)
    return data.astype(np.float32)


def _cast(self: Any, src: Any, dst_type: Any) -> Any:
    source, target = src.dtype.scalar, dst_type.scalar
    if source == tl.bfloat16 and target == tl.float32:
        return TensorHandle(_to_float(src.data, source), target)
    if source == tl.float32 and target == tl.bfloat16:
        rounded = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), target)
    return _original_cast(self, src, dst_type)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, imprecise: Any) -> Any:
    left, right = _to_float(a.data, a.dtype), _to_float(b.data, b.dtype)
    accumulator = d.data.copy()
    for k in range(left.shape[1]):
        accumulator += left[:, k : k + 1] * right[k : k + 1]
    return TensorHandle(accumulator, d.dtype.scalar)


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    # An fp64 product of fp32 numbers is exact; its sum is rounded to fp64 first, which moves the
    # fp32 result in one case of 2**29.
    wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return TensorHandle(wide.astype(np.float32), z.dtype.scalar)


def install() -> None:
    """Replace the methods for this process."""
    InterpreterBuilder.create_fma = _fma
    InterpreterBuilder.cast_impl = _cast
    InterpreterBuilder.create_dot = _dot
