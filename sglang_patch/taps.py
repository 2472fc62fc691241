"""Turning the taps of a scheduler rank on, and writing what they recorded.

`Engine.collective_rpc` carries flat values in and only success out, so a rank writes its record
into a folder on its own machine, whole or not at all, and the engine's process reads it there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from . import state
from .ops.fault import parse_fault
from .ops.taps import TapLog, TapShape, parse_kept


def start_taps(scheduler: Any, keep: str | None = None, fault: str | None = None) -> None:
    """Record from now on; `keep` names rows to store whole (`ops.taps.parse_kept`), `fault` is
    injected until the taps are saved (`ops.fault.parse_fault`).

    Raises `ValueError` under CUDA graphs: a replayed pass runs no tap.
    """
    if not scheduler.server_args.disable_cuda_graph:
        raise ValueError("taps see nothing of a replayed CUDA graph; use rollout.cuda_graph=false")
    live = state.require()
    config = scheduler.tp_worker.model_runner.model.config
    shape = TapShape(
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
    )
    if fault is not None:
        live.fault = parse_fault(fault)
    kept = None if keep is None else parse_kept(keep)
    live.taps = TapLog(shape, live.ranks.rank, live.ranks.size, kept=kept)


def save_taps(scheduler: Any, folder: str) -> None:
    """Stop recording and write `rank-N.pt` into `folder`."""
    live = state.require()
    if live.taps is None:
        raise ValueError("taps were not started in this rank")
    path = Path(folder) / f"rank-{live.ranks.rank}.pt"
    temporary = path.with_suffix(".tmp")
    torch.save(live.taps.dump(), temporary)
    temporary.rename(path)
    live.taps, live.fault = None, live.policy.fault
