from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron_models import write_folder
from megatron_ranks import RankPool


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory):  # noqa: ANN201
    """`folder(name)` writes the weights of `megatron_models.SHAPES[name]` once."""
    written: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in written:
            written[name] = tmp_path_factory.mktemp(name)
            write_folder(written[name], name)
        return written[name]

    return folder
