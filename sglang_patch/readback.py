"""What is live in this rank: contract, fingerprint, call counts, weights digest."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from . import state
from .ops.digest import weights_digest
from .weights import shard_digests

_last_digest: str | None = None


def _device_name(runner: Any) -> str:
    return torch.cuda.get_device_name() if runner.device == "cuda" else runner.device


def _rope_theta(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta", getattr(config, "rope_theta", None))
    if theta is None:
        raise ValueError("the model's config names no rope_theta")
    return float(theta)


def readback(scheduler: Any) -> dict[str, Any]:
    """This rank's report, plain JSON values. `calls` counts each hook since the process started."""
    live = state.require()
    runner = scheduler.tp_worker.model_runner
    config = runner.model.config
    fingerprint = live.policy.fingerprint(
        head_dim=config.head_dim,
        max_position=config.max_position_embeddings,
        rope_theta=_rope_theta(config),
        device=_device_name(runner),
    )
    return {
        "rank": live.ranks.rank,
        "tensor_parallel_size": live.ranks.size,
        "num_layers": config.num_hidden_layers,
        "fingerprint": fingerprint.to_dict(),
        "rank_sums": live.ranks.transport.describe(),
        "calls": dict(live.calls),
        "weights_digest": _last_digest,
    }


def gather_readbacks(scheduler: Any) -> list[dict[str, Any]]:
    """Every tensor-parallel rank's readback, in rank order, on every rank."""
    mine = readback(scheduler)
    size = state.require().ranks.size
    if size == 1:
        return [mine]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, mine, group=scheduler.tp_group.cpu_group)
    return gathered


def update_weights_digest(scheduler: Any) -> None:
    """Digest of the live weights over all ranks, kept for the next readback."""
    global _last_digest
    mine = shard_digests(scheduler.tp_worker.model_runner.model)
    size = state.require().ranks.size
    parts: list[Any] = [mine]
    if size > 1:
        parts = [None] * size
        dist.all_gather_object(parts, mine, group=scheduler.tp_group.cpu_group)
    names = {name for part in parts for name in part}
    _last_digest = weights_digest({n: sum(part.get(n, 0) for part in parts) for n in names})
