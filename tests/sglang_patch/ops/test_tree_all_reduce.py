"""Sums over real ranks: four gloo processes, inputs whose order shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from miles_launcher.conformance.bits import differing, random
from sglang_patch.ops import RankGroup, row_linear, tree_all_reduce, tree_reduce_scatter
from sglang_patch.ops.row_linear import reference as row_linear_reference
from sglang_patch.ops.tree_all_reduce import op, reference, transport
from sglang_patch.ops.tree_all_reduce.reference import sum_ranks
from sglang_patch.schema.reduction import row_reduction

WORLD = 4
CONTRACTS = {
    "v1": row_reduction("qwen3_dense_true_on_policy_v1", 1536, rollout_tp=4),
    "v1 over two rollout ranks": row_reduction("qwen3_dense_true_on_policy_v1", 1536, rollout_tp=2),
    "v2": row_reduction("qwen3_dense_true_on_policy_v2", 1536),
}

# (rows, message, sum, groups of ranks of which the first takes the bias or 0)
MESSAGES = {
    "fp32": (33, torch.float32, torch.float32, 0),
    "fp32 to bf16, bias at the root": (33, torch.float32, torch.bfloat16, 1),
    "bf16, bias at the first rank": (33, torch.bfloat16, torch.bfloat16, 4),
    "bf16, bias at the first pair": (34, torch.bfloat16, torch.bfloat16, 2),
    "fewer rows than ranks": (3, torch.float32, torch.bfloat16, 1),
}


def _message(name: str, rank: int) -> torch.Tensor:
    """Ranks 0 and 1 bring large numbers that cancel, ranks 2 and 3 larger ones."""
    rows, dtype, *_ = MESSAGES[name]
    scale = (2.0**12, 2.0**20) if dtype == torch.float32 else (2.0**3, 2.0**7)
    large = random(rows, 7, seed=30 + rank // 2, dtype=torch.float32)
    large = large * scale[rank // 2] * (1 - 2 * (rank % 2))
    return (random(rows, 7, seed=20 + rank, dtype=torch.float32) + large).to(dtype)


def _bias(name: str) -> torch.Tensor | None:
    return random(7, seed=9) if MESSAGES[name][3] else None


def _whole(name: str, order: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
    parts = [_message(name, rank) for rank in order]
    groups = MESSAGES[name][3] or 1
    return reference.combine(parts, _bias(name), groups).to(MESSAGES[name][2])


def _forms(ranks: RankGroup) -> dict[str, torch.Tensor]:
    """Every message in every form that a process group has."""
    found = {}
    for form, largest in (("gather", 1 << 30), ("exchange", 0)):
        op.GATHER_BYTES = largest  # type: ignore[misc]
        for name, (_, _, out_dtype, groups) in MESSAGES.items():
            x = _message(name, ranks.rank)
            keywords = {"bias": _bias(name), "bias_ranks": groups or 1, "out_dtype": out_dtype}
            found[f"{form} {name}"] = tree_all_reduce(x, ranks, **keywords)
            if form == "exchange":
                found[f"scatter {name}"] = tree_reduce_scatter(x, ranks, **keywords)
    return found


def _operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return random(5, 1536, seed=1), random(8, 1536, seed=2), random(8, seed=3)


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    ranks = RankGroup.of(dist.group.WORLD)
    decided = transport.connect(dist.group.WORLD, torch.device("cpu"))
    assert decided is transport.connect(dist.group.WORLD, torch.device("cpu")) is ranks.transport
    x, weight, bias = _operands()
    cut = slice(rank * 384, (rank + 1) * 384)
    results: dict[str, Any] = {
        str(dtype): tree_all_reduce(random(33, 7, seed=10 + rank, dtype=dtype), ranks)
        for dtype in (torch.bfloat16, torch.float32)
    }
    for name, reduction in CONTRACTS.items():
        results[name] = row_linear(
            x[:, cut], weight[:, cut], bias, reduction=reduction, ranks=ranks
        )
    transport.form_calls.clear()
    results |= _forms(ranks)
    results["told"] = (decided.describe(), dict(transport.form_calls))
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


@pytest.mark.parametrize("name", list(MESSAGES))
def test_every_form_over_a_process_group_has_the_tree_s_bits(
    results: list[dict[str, torch.Tensor]], name: str
) -> None:
    rows, _, out_dtype, _ = MESSAGES[name]
    expected = _whole(name)
    for found in results:
        for form in ("gather", "exchange"):
            assert differing(found[f"{form} {name}"], expected) == 0
            assert found[f"{form} {name}"].dtype == out_dtype
    assert differing(_whole(name, (0, 2, 1, 3)), expected) > 0, "a wrong rank order must show"
    scattered = torch.cat([found[f"scatter {name}"] for found in results])
    share = -(-rows // WORLD)
    assert scattered.shape[0] == WORLD * share
    assert differing(scattered[:rows], expected) == 0
    assert not scattered[rows:].count_nonzero()


def test_what_was_decided_is_told_and_what_ran_is_counted(results: list[dict[str, Any]]) -> None:
    for found in results:
        told, calls = found["told"]
        assert told == "process group (ranks on cpu)"
        assert set(calls) == {"gather", "exchange", "scatter by exchange"}
        assert set(calls.values()) == {len(MESSAGES)}


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 3)
    parts = [x] * 4
    with pytest.raises(ValueError, match="tensor_parallel_size=3"):
        op.combine([x] * 3)
    for groups in (0, 3, 8):
        with pytest.raises(ValueError, match=f"first of {groups} parts, over 4 ranks"):
            op.combine(parts, torch.ones(3), groups)
    with pytest.raises(ValueError, match="not \\[rows, columns\\]"):
        tree_reduce_scatter(x[0], RankGroup())
    monkeypatch.setenv(transport.VARIABLE, "multicast")
    with pytest.raises(ValueError, match="choose from 'auto'"):
        transport._chosen(None)
    assert transport.transport_of(None).workspace is None


def test_a_group_needs_a_process_group_and_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="size=4"):
        RankGroup(size=4)
    with pytest.raises(ValueError, match="tensor_parallel_size=3"):
        sum_ranks([torch.ones(2)] * 3)
    x = torch.ones(3)
    assert differing(tree_all_reduce(x, RankGroup()), x) == 0
