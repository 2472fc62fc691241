"""Sums over real ranks: four gloo processes, inputs whose order shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from miles_launcher.conformance.bits import differing, random
from sglang_patch.ops import RankGroup, row_linear, tree_all_reduce
from sglang_patch.ops.row_linear import reference as row_linear_reference
from sglang_patch.ops.tree_all_reduce.reference import sum_ranks
from sglang_patch.schema.reduction import row_reduction

WORLD = 4
CONTRACTS = {
    "v1": row_reduction("qwen3_dense_true_on_policy_v1", 1536, rollout_tp=4),
    "v1 over two rollout ranks": row_reduction("qwen3_dense_true_on_policy_v1", 1536, rollout_tp=2),
    "v2": row_reduction("qwen3_dense_true_on_policy_v2", 1536),
}


def _operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return random(5, 1536, seed=1), random(8, 1536, seed=2), random(8, seed=3)


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    ranks = RankGroup.of(dist.group.WORLD)
    x, weight, bias = _operands()
    cut = slice(rank * 384, (rank + 1) * 384)
    results = {
        str(dtype): tree_all_reduce(random(33, 7, seed=10 + rank, dtype=dtype), ranks)
        for dtype in (torch.bfloat16, torch.float32)
    }
    for name, reduction in CONTRACTS.items():
        results[name] = row_linear(
            x[:, cut], weight[:, cut], bias, reduction=reduction, ranks=ranks
        )
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(_rank, args=(str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_four_ranks_add_as_the_tree(
    results: list[dict[str, torch.Tensor]], dtype: torch.dtype
) -> None:
    a, b, c, d = (random(33, 7, seed=10 + rank, dtype=dtype) for rank in range(WORLD))
    expected = (a + b) + (c + d)
    for found in results:
        assert differing(found[str(dtype)], expected) == 0
    assert differing((a + c) + (b + d), expected) > 0, "a wrong rank order must show"
    assert differing(((a + b) + c) + d, expected) > 0, "a chain must show"
    assert differing(sum_ranks([a, b, c, d]), expected) == 0


@pytest.mark.parametrize("contract", list(CONTRACTS))
def test_row_linear_over_four_ranks_equals_the_oracle(
    results: list[dict[str, torch.Tensor]], contract: str
) -> None:
    x, weight, bias = _operands()
    expected = row_linear_reference.row_linear(x, weight, bias, CONTRACTS[contract])
    for found in results:
        assert differing(found[contract], expected) == 0
    without = row_linear_reference.row_linear(x, weight, None, CONTRACTS[contract])
    assert differing(without, expected) > 0


def test_a_group_needs_a_process_group_and_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="size=4"):
        RankGroup(size=4)
    with pytest.raises(ValueError, match="tensor_parallel_size=3"):
        sum_ranks([torch.ones(2)] * 3)
    x = torch.ones(3)
    assert differing(tree_all_reduce(x, RankGroup()), x) == 0
