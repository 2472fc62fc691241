"""An attention whose bits change between prefill and decode is refused, by engine and op."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_patch.hooks.model import check_attention
from sglang_patch.ops import attention
from sglang_patch.ops.attention.kernel import launch_attention, launch_flash3
from sglang_patch.ops.attention.op import check_path, gpu_path


def runner(head_dim: int, backend: str, device: str = "cuda", **arguments: str) -> Any:
    return SimpleNamespace(
        server_args=SimpleNamespace(attention_backend=backend, **arguments),
        device=device,
        model_config=SimpleNamespace(head_dim=head_dim),
    )


def gpu(monkeypatch: pytest.MonkeyPatch, *capability: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)


def test_the_engine_takes_fa3_on_hopper_for_heads_of_128_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_attention(runner(64, "torch_native", "cpu"))
    gpu(monkeypatch, 9, 0)
    check_attention(runner(128, "fa3"))
    check_attention(runner(128, "triton"))
    check_attention(runner(64, "triton"))
    with pytest.raises(ValueError, match="head_dim=64; FA3's decode .* use the path triton"):
        check_attention(runner(64, "fa3"))
    with pytest.raises(
        ValueError, match="attention_backend='flashinfer' on cuda: .* fa3 or triton"
    ):
        check_attention(runner(128, "flashinfer"))
    with pytest.raises(ValueError, match="attention_backend='torch_native' on cuda"):
        check_attention(runner(128, "torch_native"))
    with pytest.raises(ValueError, match="attention_backend='triton' on cpu"):
        check_attention(runner(128, "triton", "cpu"))
    with pytest.raises(ValueError, match="decode_attention_backend='fa3' beside .*'triton'"):
        check_attention(runner(128, "triton", decode_attention_backend="fa3"))
    gpu(monkeypatch, 8, 0)
    check_attention(runner(128, "triton"))
    with pytest.raises(ValueError, match=r"capability 8\.0: it was shown on Hopper"):
        check_attention(runner(128, "fa3"))


def test_the_path_of_a_gpu() -> None:
    assert gpu_path((9, 0), 128) == "fa3"
    others = [((9, 0), 64), ((8, 0), 128), ((8, 6), 128), ((10, 0), 128), ((12, 0), 64)]
    assert {gpu_path(*other) for other in others} == {"triton"}
    for head_dim in (0, 20, 264):
        with pytest.raises(ValueError, match=f"head_dim={head_dim} must be a multiple of 8"):
            check_path("triton", "cuda", (9, 0), head_dim)
    with pytest.raises(ValueError, match="'fa2': choose from reference, fa3, triton"):
        check_path("fa2", "cuda", (9, 0), 64)
    with pytest.raises(ValueError, match="'reference' on cuda"):
        check_path("reference", "cuda", (9, 0), 64)


def test_the_op_refuses_before_it_looks_for_the_kernel() -> None:
    heads = torch.zeros(3, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="head_dim=64; FA3's decode has the bits of its prefill"):
        launch_flash3(heads, heads, heads, [3], [3], 0.125)
    with pytest.raises(ValueError, match="must be bfloat16"):
        launch_attention(heads.half(), heads.half(), heads.half(), [3], [3], 0.125)
    with pytest.raises(ValueError, match="'triton' on cpu: a CPU has the reference"):
        attention(heads, heads, heads, query_lengths=[3], scale=0.125, path="triton")
    with pytest.raises(ValueError, match="scale=-0.1 must be positive"):
        attention(heads, heads, heads, query_lengths=[3], scale=-0.1)
    named = attention(heads, heads, heads, query_lengths=[3], scale=0.125, path="reference")
    assert torch.equal(named, attention(heads, heads, heads, query_lengths=[3], scale=0.125))
