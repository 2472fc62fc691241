"""The real engine on a machine without a GPU: `GroupCoordinator` builds no GPU communicators.

Upstream surface: `distributed.parallel_state.GroupCoordinator.__init__`. Inert on a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .target import Hook

_COMMUNICATORS = (
    "use_pynccl",
    "use_pymscclpp",
    "use_custom_allreduce",
    "use_torch_symm_mem_all_reduce",
)


def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Turn the GPU communicators off where the platform is the CPU reference platform."""
    from sglang.srt.platforms import current_platform

    from ..cpu_platform import TrueOnPolicyCpuPlatform

    if isinstance(current_platform, TrueOnPolicyCpuPlatform):
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        for name in _COMMUNICATORS:
            bound.arguments[name] = False
        args, kwargs = bound.args[1:], bound.kwargs
    original(self, *args, **kwargs)


HOOKS = (
    Hook(
        name="cpu_group",
        target="sglang.srt.distributed.parallel_state.GroupCoordinator.__init__",
        digest="03ba3c797672f522",
        replacement=init,
        always=True,
    ),
)
