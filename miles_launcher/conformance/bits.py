"""Equality on bits, and inputs for which the order of a sum shows."""

from __future__ import annotations

import torch

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bit patterns of `x` as integers: -0.0 differs from 0.0 and a NaN equals itself."""
    return x.contiguous().view(_INTEGER[x.element_size()])


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements differ in their bits; shapes and dtypes must be equal, and not empty."""
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, a.dtype, b.shape, b.dtype)
    assert a.numel() > 0, "zero elements compared is a failure, never a pass"
    return int((bits(a) != bits(b)).sum())


def one_ulp(x: torch.Tensor) -> torch.Tensor:
    """`x` with its first element moved by one unit in the last place."""
    moved = bits(x.clone()).flatten()
    moved[0] += 1
    return moved.view(x.dtype).view(x.shape)


def random(
    *shape: int, seed: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0
) -> torch.Tensor:
    """Seeded normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def exact_leaves(rows: int, k_size: int, num_leaves: int, seed: int) -> torch.Tensor:
    """[rows, k_size] bf16 whose products with `small_integers` are exact inside a leaf.

    Integers up to 16 times one power of two a leaf: a leaf's fp32 accumulator is exact in any
    order, while the leaves' sums round, so only the order of the leaves decides the bits.
    """
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-16, 17, (rows, k_size), generator=generator).float()
    exponents = torch.randint(-9, 10, (rows, num_leaves), generator=generator).float()
    scale = (2.0**exponents).repeat_interleave(k_size // num_leaves, dim=1)
    return (integers * scale).to(torch.bfloat16)


def small_integers(rows: int, k_size: int, seed: int) -> torch.Tensor:
    """[rows, k_size] bf16 integers from -16 to 16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-16, 17, (rows, k_size), generator=generator).to(torch.bfloat16)
