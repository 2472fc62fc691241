"""The real engine on a machine without a GPU; installed only where the CPU platform is selected.

Upstream surfaces: `distributed.parallel_state.GroupCoordinator.__init__` (builds no GPU
communicators) and `sglang.kernels.ops.sampling.murmur_hash.murmur_hash32` (a Triton kernel, the
noise of seeded sampling; here the same integers in PyTorch).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from .target import Hook

_COMMUNICATORS = (
    "use_pynccl",
    "use_pymscclpp",
    "use_custom_allreduce",
    "use_torch_symm_mem_all_reduce",
)


_MASK = 0xFFFFFFFF


def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Build the group without GPU communicators."""
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    for name in _COMMUNICATORS:
        bound.arguments[name] = False
    original(*bound.args, **bound.kwargs)


def _rotate(x: torch.Tensor, by: int) -> torch.Tensor:
    return ((x << by) | (x >> (32 - by))) & _MASK


def _mix(h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    k = (_rotate((k * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK
    return (_rotate(h ^ k, 13) * 5 + 0xE6546B64) & _MASK


def murmur_hash32(
    original: Callable[..., torch.Tensor],
    seed: torch.Tensor,
    positions: torch.Tensor,
    col_indices: torch.Tensor,
) -> torch.Tensor:
    """MurmurHash3 (32 bit) of (seed, position, column); seed, positions: [rows], col_indices:
    [columns] -> [rows, columns] uint32. int64 arithmetic, masked after every step."""
    seed = seed.view(torch.int64)
    h = torch.zeros_like(seed)
    h = _mix(h, seed & _MASK)
    h = _mix(h, (seed >> 32) & _MASK)
    h = _mix(h, positions.to(torch.int64) & _MASK)
    h = _mix(h[:, None], col_indices.to(torch.int64)[None, :] & _MASK)
    h = h ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return (h ^ (h >> 16)).to(torch.uint32)


HOOKS = (
    Hook(
        name="cpu_group",
        target="sglang.srt.distributed.parallel_state.GroupCoordinator.__init__",
        digest="03ba3c797672f522",
        replacement=init,
        always=True,
        cpu_only=True,
    ),
    Hook(
        name="murmur_hash32",
        target="sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
        digest="c29182a1453d92b0",
        replacement=murmur_hash32,
        always=True,
        cpu_only=True,
    ),
)
