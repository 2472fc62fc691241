"""torch.library registration: schema, fake tensors, tracing, and the vendored copy's own names."""

from __future__ import annotations

import pytest
import torch

from miles_launcher.conformance.bits import random
from sglang_patch.ops import rope_table

FP32 = torch.float32
X, WEIGHT = random(5, 256, seed=1), random(48, 256, seed=2)
HEADS = random(5, 4, 32, seed=3)
LOGITS = random(5, 500, seed=4, dtype=FP32)
STATISTICS = random(5, 8, seed=5, dtype=FP32).abs() + 1.0
TARGETS = torch.tensor([0, 499, 3, 64, 63])
NORM = random(64, seed=6)
QK_NORMS = random(2, 32, seed=7).unbind()

CASES = {
    "attention": ("attention", (HEADS, HEADS[:, :2], HEADS[:, 2:], [2, 3], [2, 3], 0.2)),
    "linear": ("linear", (X, WEIGHT, WEIGHT[:, 0].contiguous(), "float32")),
    "linear strided": ("linear", (X[:, ::2], WEIGHT[:, 128:], None, "bfloat16")),
    "add_rms_norm": ("add_rms_norm", (X, WEIGHT[0], X.float(), 1e-6)),
    "rms_norm fp32": ("rms_norm", (X.float(), WEIGHT[0], 1e-6)),
    "rms_norm transposed": ("rms_norm", (X.view(5, 4, 64).transpose(0, 1), NORM, 1e-6)),
    "qk_norm_rope": (
        "qk_norm_rope",
        (HEADS, HEADS[:, :2], *QK_NORMS, 1e-6, torch.arange(5), rope_table(32, 8, 1e6)),
    ),
    "qk_norm_rope grouped": (
        "qk_norm_rope",
        (
            X.view(5, 2, 4, 32)[:, :, :2],
            X.view(5, 2, 4, 32)[:, :, 2],
            *QK_NORMS,
            1e-6,
            torch.arange(5),
            rope_table(32, 8, 1e6),
        ),
    ),
    "rope": ("rope", (HEADS, HEADS[:, :2], torch.arange(5), rope_table(32, 8, 1e6))),
    "rope transposed": (
        "rope",
        (
            HEADS.transpose(0, 1).contiguous().transpose(0, 1),
            HEADS[:, :2],
            torch.arange(5),
            rope_table(32, 8, 1e6),
        ),
    ),
    "row_linear": ("row_linear_partial", (X, WEIGHT, 2, 2, "bfloat16")),
    "row_linear whole": ("row_linear_whole", (X, WEIGHT, 2, 2, "float32", "bfloat16")),
    "segment_statistics": ("segment_statistics", (LOGITS, 64, 8, [64] * 7 + [52])),
    "segment_statistics strided": ("segment_statistics", (LOGITS.t()[:5], 8, 1, [5])),
    "segment_statistics divided": (
        "segment_statistics",
        (LOGITS.bfloat16(), 64, 8, [64] * 7 + [52], torch.tensor(0.7)),
    ),
    "token_statistics": (
        "token_statistics",
        (LOGITS, torch.tensor(0.7), TARGETS, 0, 64, 8, [64] * 7 + [52], True),
    ),
    "token_statistics v1": (
        "token_statistics",
        (LOGITS.bfloat16(), STATISTICS[:, :1], TARGETS, 0, 500, 1, [500], False),
    ),
    "log_softmax": ("log_softmax", (LOGITS, STATISTICS[:, :1], STATISTICS, STATISTICS, 499)),
    "log_softmax strided": ("log_softmax", (LOGITS.t()[:5], None, STATISTICS, STATISTICS, 3)),
    "logits_gradient": (
        "logits_gradient",
        (LOGITS, torch.tensor(0.7), TARGETS, *STATISTICS.t()[:2], 0, 499, "bfloat16"),
    ),
    "combine_entropy": ("combine_segments", (STATISTICS, STATISTICS, STATISTICS)),
    "combine_segments": ("combine_segments", (STATISTICS, STATISTICS)),
    "silu_mul": ("silu_mul", (X,)),
    "silu_mul transposed": ("silu_mul", (X.view(5, 4, 64).transpose(0, 1),)),
}


@pytest.mark.parametrize("case", list(CASES))
def test_the_fake_agrees_with_the_op(case: str) -> None:
    name, arguments = CASES[case]
    op = getattr(torch.ops.sglang_patch, name).default
    torch.library.opcheck(op, arguments)
    # opcheck lets strides pass; a GPU kernel writes what the fake promised.
    fakes = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
    real, fake = op(*arguments), op(*fakes)
    pairs = [(real, fake)] if isinstance(real, torch.Tensor) else zip(real, fake, strict=True)
    for found, promised in pairs:
        assert found.stride() == promised.stride() and found.is_contiguous()


def test_both_copies_register_under_their_own_package() -> None:
    import megatron_patch.ops

    assert megatron_patch.ops.linear is not None
    for name in {op for op, _ in CASES.values()}:
        assert hasattr(torch.ops.megatron_patch, name) and hasattr(torch.ops.sglang_patch, name)
