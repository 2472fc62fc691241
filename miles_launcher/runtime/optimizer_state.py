"""The optimizer of one trainer rank in a file, for resuming a run in the same layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .trainer_rank import TrainerRank


def _place(rank: TrainerRank) -> dict[str, int]:
    config = rank.config
    return {
        "world_size": config.world_size,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "context_parallel_size": config.context_parallel_size,
    }


def _file(rank: TrainerRank, folder: str | Path) -> Path:
    return Path(folder) / f"optimizer-rank-{rank.config.rank}.pt"


def save_optimizer(rank: TrainerRank, folder: str | Path) -> None:
    """Write fp32 master weights and moments of this rank's shard into `folder`."""
    path = _file(rank, folder)
    temporary = path.with_suffix(".tmp")
    torch.save({"place": _place(rank), "optimizer": rank.optimizer.state_dict()}, temporary)
    temporary.rename(path)


def load_optimizer(rank: TrainerRank, folder: str | Path) -> None:
    """Read what `save_optimizer` wrote. Raises `ValueError` naming the file that is missing, or
    both layouts where another one wrote it."""
    path = _file(rank, folder)
    if not path.is_file():
        raise ValueError(f"{path}: no optimizer state of this rank")
    data = torch.load(path, map_location=rank.device, weights_only=False)
    if data["place"] != _place(rank):
        raise ValueError(
            f"{path}: written by layout {data['place']}, this run has {_place(rank)}; resume with "
            "the same layout"
        )
    rank.optimizer.load_state_dict(data["optimizer"])
