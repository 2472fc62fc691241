"""Heads whose bits change between prefill and decode are refused, by the engine and by the op."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_patch.hooks.model import check_attention
from sglang_patch.ops.attention.kernel import launch_flash3


def runner(head_dim: int, backend: str, device: str = "cuda") -> Any:
    return SimpleNamespace(
        server_args=SimpleNamespace(attention_backend=backend),
        device=device,
        model_config=SimpleNamespace(head_dim=head_dim),
    )


def test_the_engine_takes_fa3_for_heads_of_128_alone() -> None:
    check_attention(runner(128, "fa3"))
    check_attention(runner(64, "torch_native", "cpu"))
    with pytest.raises(ValueError, match="head_dim=64 on a GPU: FA3's decode"):
        check_attention(runner(64, "fa3"))
    with pytest.raises(ValueError, match="attention_backend='triton' on cuda"):
        check_attention(runner(128, "triton"))


def test_the_op_refuses_them_before_it_looks_for_the_kernel() -> None:
    heads = torch.zeros(3, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="head_dim=64; FA3's decode has the bits of its prefill"):
        launch_flash3(heads, heads, heads, [3], [3], 0.125)
