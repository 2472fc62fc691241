"""Stock megatron-core on a machine without a GPU.

megatron-core writes `device="cuda"`, `torch.cuda.current_device()` and CUDA type names in many
places. `active()` answers those from the CPU, for the length of a `with` block and this process
only; it refuses where a GPU is present, so that it can never hide one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _is_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Turns device "cuda" into "cpu", and names CPU tensor types as megatron's optimizer does."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Float16OptimizerWithFloat16Params and clip_grads sort parameters by this string.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to and any(_is_cuda(a) for a in args[1:]):
            args = (args[0], *(_CPU if _is_cuda(a) else a for a in args[1:]))
        return func(*args, **kwargs)


def _no_state(*_: Any, **__: Any) -> None:
    """There is no CUDA generator to read or restore; dropout is 0, so nothing draws from it."""


@contextlib.contextmanager
def _no_fork(*_: Any, **__: Any) -> Iterator[None]:
    yield


@contextlib.contextmanager
def active() -> Iterator[None]:
    """Run megatron-core on the CPU inside this block.

    Raises `ValueError` where CUDA is available: choose device="cuda" there.
    """
    if torch.cuda.is_available():
        raise ValueError(
            "cpu_platform: this machine has a GPU; the CPU shims are for machines without one. "
            'Use device="cuda", or hide the GPU with CUDA_VISIBLE_DEVICES=""'
        )
    from megatron.core.tensor_parallel import random

    with (
        mock.patch.object(torch.cuda, "current_device", return_value=_CPU),
        mock.patch.object(torch.cuda, "synchronize", _no_state),
        mock.patch.object(random, "_get_cuda_rng_state", _no_state),
        mock.patch.object(random, "_set_cuda_rng_state", _no_state),
        mock.patch.object(random.CudaRNGStatesTracker, "fork", _no_fork),
        _CudaMeansCpu(),
    ):
        yield


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Inside `active`, hand torch calls straight to torch: for our own layers, which name their
    device, and whose inner loops should not pay for a Python call each."""
    with torch._C.DisableTorchFunction():
        yield
