"""Number formats of an op, and the namespace of its torch.library registration."""

from __future__ import annotations

import torch

NAMESPACE = __name__.split(".", maxsplit=1)[0]

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for 16- and 32-bit inputs. fp64 inputs stay fp64 throughout: that is how gradcheck
    sees the same code without its rounding points."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rounded_dtype(x_dtype: torch.dtype, name: str) -> torch.dtype:
    """The dtype called `name` at a rounding point, or fp64 where the input is fp64."""
    return torch.float64 if x_dtype == torch.float64 else DTYPES[name]


def require(condition: bool, message: str) -> None:
    """`ValueError(message)` unless the caller's arguments satisfy `condition`."""
    if not condition:
        raise ValueError(message)


def eager_on_gpu(x: torch.Tensor) -> bool:
    """Whether a public op may call its kernel's launcher itself. torch.library's dispatch takes
    longer than many kernels run; it is for those who trace: compilers, fake tensors, subclasses."""
    return x.is_cuda and type(x) is torch.Tensor and not torch.compiler.is_compiling()
