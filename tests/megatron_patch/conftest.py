from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron_models import write_folder
from megatron_ranks import RankPool

_pools: list[RankPool] = []


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    _pools.append(RankPool())
    yield _pools[-1]
    _pools.pop().close()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The ranks hold a gigabyte each: end them with this folder's last test, not the session's."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        for pool in _pools:
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
