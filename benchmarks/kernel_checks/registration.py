"""The registered ops on the device at hand."""

from __future__ import annotations

import torch

from benchmarks.bitwise import differing, random
from benchmarks.kernel_checks.setting import Setting
from sglang_patch.ops.log_softmax.kernel import (
    launch_segment_statistics,
)
from sglang_patch.ops.rope.op import rope_table

BF16, FP32 = torch.bfloat16, torch.float32


def public_ops(s: Setting) -> str:
    """The registered ops: fake and real agree, no hidden alias, a GPU runs the kernels."""
    x, weight = random(5, 256, seed=30).to(s.device), random(48, 256, seed=31).to(s.device)
    heads = random(5, 4, 32, seed=32).to(s.device)
    positions, table = torch.arange(5, device=s.device), rope_table(32, 8, 1e6).to(s.device)
    logits = random(5, 512, seed=33, dtype=FP32).to(s.device)
    statistics = launch_segment_statistics(logits, 64, 8, [64] * 8)
    calls = {
        "rms_norm": (x, weight[0], x.float(), 1e-6),
        "rope": (heads, heads[:, :2], positions, table),
        "silu_mul": (x,),
        "linear": (x, weight, weight[:, 0].contiguous(), "float32"),
        "row_linear_partial": (x, weight, 2, 2, "bfloat16"),
        "row_linear_whole": (x, weight, 2, 2, "float32", "bfloat16"),
        "segment_statistics": (logits, 64, 8, [64] * 8),
        "combine_segments": statistics,
    }
    for name, arguments in calls.items():
        op = getattr(torch.ops.sglang_patch, name).default
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
        moved = [a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments]
        found, wanted = op(*arguments), op(*moved)
        if name not in ("linear", "row_linear_partial", "row_linear_whole"):
            pairs = (
                [(found, wanted)]
                if isinstance(found, torch.Tensor)
                else zip(found, wanted, strict=True)
            )
            for a, b in pairs:
                assert differing(a.cpu(), b) == 0, name
    return f"{', '.join(calls)}"
