"""The CPU reference platform: stock SGLang serves on a machine without a GPU.

Selected with SGLANG_PLATFORM=true_on_policy_cpu (entry point group `sglang.srt.platforms`). It
subclasses SGLang's own CPU platform but presents itself as out-of-tree, so that SGLang asks it
instead of the AMX build of its kernels. Upstream surface: `sglang.srt.platforms.interface`.
"""

from __future__ import annotations

import os

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum

NAME = "true_on_policy_cpu"


def activate() -> str | None:
    """The platform class's path where this platform was asked for by name, else None: a machine
    with a GPU must never come to serve on its CPU because this package is installed."""
    if os.environ.get("SGLANG_PLATFORM") != NAME:
        return None
    return f"{__name__}.TrueOnPolicyCpuPlatform"


class TrueOnPolicyCpuPlatform(CpuSRTPlatform):
    """PyTorch-native ops, gloo, plain key/value pools; no graphs, no fp8."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args: object) -> None:
        """Let deterministic inference accept the native attention, whose op a hook replaces and
        whose bits do not depend on what a prefix cache already holds."""
        from sglang.srt import server_args as module

        if "torch_native" not in module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
            module.add_deterministic_attention_backend_choices(["torch_native"])
            module.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

        return PagedTokenToKVPoolAllocator

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> object:
        import torch

        return torch.profiler.ProfilerActivity.CPU

    def get_dispatch_key_name(self) -> str:
        return "native"
