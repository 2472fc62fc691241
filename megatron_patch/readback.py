"""What is live in this trainer rank: the launcher compares it with the rollout's before a token."""

from __future__ import annotations

from typing import Any

import torch

from . import faults
from .autograd.products import op_calls
from .config import PolicyTransformerConfig
from .contracts import fingerprint
from .ops.tree_all_reduce.transport import describe_all


def readback(config: PolicyTransformerConfig, device: torch.device) -> dict[str, Any]:
    """Plain JSON values: `contract`, `fingerprint` (`Fingerprint.to_dict`), `segments`, `paths` of
    the row-parallel sums, `rank_sums` (how they travel between ranks; empty for one), `op_calls`
    and `layer_calls` since `reset_calls`, `fault`."""
    policy = config.policy
    return {
        "contract": policy.contract.name,
        "fingerprint": fingerprint(policy, device, config.rope.on(torch.device("cpu"))).to_dict(),
        "segments": policy.segments,
        "paths": {"o_proj": policy.o_proj.path, "down_proj": policy.down_proj.path},
        "rank_sums": describe_all(),
        "op_calls": dict(op_calls),
        "layer_calls": dict(faults.calls),
        "fault": repr(faults.active_fault()) if faults.active_fault() is not None else None,
    }


def reset_calls() -> None:
    """Count from zero again."""
    op_calls.clear()
    faults.calls.clear()
