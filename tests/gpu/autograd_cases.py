"""Every differentiable op at shapes that its GPU kernels take, and its gradient in fp64.

`measured` runs an op in its own formats on a device; `exact` runs the same text in fp64 on the CPU,
where `tests/megatron_patch/test_megatron_autograd.py` holds it to gradcheck.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megatron_patch import autograd, ops
from megatron_patch.autograd import HeadLayout, HeadSettings
from megatron_patch.schema import row_reduction, vocabulary_segments

V2 = "qwen3_dense_true_on_policy_v2"
TOKENS, HIDDEN = 130, 256
# What may be missing between bf16 roundings on the way and none: a share of the gradient's norm.
BOUND = 1e-2

Call = Callable[..., Any]
Make = Callable[[str], tuple[Call, list[torch.Tensor]]]


def draw(*size: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=generator) * 0.5 + shift).bfloat16()


def _linear(stride: int, columns: int) -> Make:
    def make(device: str) -> tuple[Call, list[torch.Tensor]]:
        inputs = [draw(TOKENS, HIDDEN, seed=1), draw(columns, HIDDEN, seed=2)]
        return lambda x, w: autograd.linear(x, w, stride=stride), inputs

    return make


def _row_linear(device: str) -> tuple[Call, list[torch.Tensor]]:
    reduction = row_reduction(V2, 512, rollout_tp=1, segments=4)
    inputs = [draw(TOKENS, 512, seed=3), draw(HIDDEN, 512, seed=4)]
    return lambda x, w: autograd.row_linear(x, w, reduction=reduction), inputs


def _rms_norm(device: str) -> tuple[Call, list[torch.Tensor]]:
    inputs = [draw(TOKENS, HIDDEN, seed=5), draw(HIDDEN, seed=6, shift=1.0)]
    return lambda x, w: autograd.rms_norm(x, w, 1e-6), inputs


def _stream_rms_norm(device: str) -> tuple[Call, list[torch.Tensor]]:
    inputs = [draw(TOKENS, HIDDEN, seed=7).float(), draw(HIDDEN, seed=8, shift=1.0)]
    return lambda x, w: autograd.stream_rms_norm(x, w, 1e-6), inputs


def _add_rms_norm(device: str) -> tuple[Call, list[torch.Tensor]]:
    inputs = [
        draw(TOKENS, HIDDEN, seed=9),
        draw(TOKENS, HIDDEN, seed=10).float(),
        draw(HIDDEN, seed=11, shift=1.0),
    ]
    return lambda x, r, w: autograd.add_rms_norm(x, r, w, 1e-6), inputs


def _qk_norm_rope(device: str) -> tuple[Call, list[torch.Tensor]]:
    layout = HeadLayout(groups=2, per_group=2, dim=64, first=0, owned=2)
    table = ops.rope_table(64, 512, 1e4).to(device)
    positions = torch.arange(TOKENS, device=device)

    def call(mixed: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Any:
        wide = table.double() if mixed.dtype == torch.float64 else table
        return autograd.qk_norm_rope(mixed, q, k, 1e-6, positions, wide, layout)

    return call, [
        draw(TOKENS, 8 * 64, seed=12),
        draw(64, seed=13, shift=1.0),
        draw(64, seed=14, shift=1.0),
    ]


def _silu_mul(device: str) -> tuple[Call, list[torch.Tensor]]:
    return autograd.silu_mul, [draw(TOKENS, 2 * 384, seed=15)]


def _embedding(device: str) -> tuple[Call, list[torch.Tensor]]:
    ids = torch.randint(
        50, (TOKENS,), generator=torch.Generator().manual_seed(16), dtype=torch.int64
    ).to(device)
    return lambda table: autograd.embedding(ids, table), [draw(64, HIDDEN, seed=17)]


def _head(device: str) -> tuple[Call, list[torch.Tensor]]:
    vocabulary = vocabulary_segments(V2, 1000)
    ids = torch.randint(
        1000, (TOKENS,), generator=torch.Generator().manual_seed(18), dtype=torch.int64
    ).to(device)
    temperature = torch.tensor(0.7, device=device)

    def call(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        settings = HeadSettings(
            vocabulary=vocabulary,
            order="segments",
            out_dtype="float32",
            # A few rows at a time.
            memory_bytes=4 * vocabulary.padded_size * 40,
        )
        warm = temperature.double() if x.dtype == torch.float64 else temperature
        return autograd.head_logprobs(x, table, ids, warm, settings)[0]

    return call, [draw(TOKENS, HIDDEN, seed=19), draw(vocabulary.padded_size, HIDDEN, seed=20)]


CASES: dict[str, Make] = {
    "linear": _linear(1, 192),
    "linear-fused": _linear(2, 1024),
    "row_linear": _row_linear,
    "rms_norm": _rms_norm,
    "stream_rms_norm": _stream_rms_norm,
    "add_rms_norm": _add_rms_norm,
    "qk_norm_rope": _qk_norm_rope,
    "silu_mul": _silu_mul,
    "embedding": _embedding,
    "head": _head,
}


def _gradients(
    call: Call, leaves: list[torch.Tensor], recompute: bool, wide: bool
) -> list[torch.Tensor]:
    outs = checkpoint(call, *leaves, use_reentrant=False) if recompute else call(*leaves)
    outs = [outs] if isinstance(outs, torch.Tensor) else list(outs)
    given = []
    for number, out in enumerate(outs):
        gradient = draw(*out.shape, seed=30 + number)
        given.append(gradient.double() if wide else gradient.to(out.device, out.dtype))
    return list(torch.autograd.grad(outs, leaves, given))


def measured(name: str, device: str, recompute: bool = False) -> list[torch.Tensor]:
    """The gradients of an op's inputs, in its own formats on `device`."""
    call, inputs = CASES[name](device)
    leaves = [x.to(device).requires_grad_() for x in inputs]
    return _gradients(call, leaves, recompute, wide=False)


def exact(name: str) -> list[torch.Tensor]:
    """The same of the same numbers in fp64 on the CPU."""
    call, inputs = CASES[name]("cpu")
    return _gradients(call, [x.double().requires_grad_() for x in inputs], False, wide=True)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The difference as a share of the gradient."""
    return float((found.double().cpu() - wanted).norm() / wanted.norm())
