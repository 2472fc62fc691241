"""Sums over ranks on a GPU: four processes that share it, and the kernels in one process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("not run: no GPU", allow_module_level=True)

from miles_launcher.conformance.bits import differing
from sglang_patch.ops import row_linear
from sglang_patch.ops.tree_all_reduce import reference
from sglang_patch.ops.tree_all_reduce.op import combine

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORLD = 4


def _module() -> Any:
    spec = importlib.util.spec_from_file_location("one_gpu_ranks", HERE / "one_gpu_ranks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = _module()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, str(HERE / "one_gpu_ranks.py"), str(folder), str(WORLD)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def _expected(name: str, rows: int, dtype: torch.dtype, parts: int, order: Any) -> torch.Tensor:
    messages = [CASES.message(name, rank, rows, dtype) for rank in order]
    return reference.combine(messages, CASES.bias() if parts else None, parts or 1)


@pytest.mark.parametrize("name", list(CASES.SUMS))
def test_all_reduce(found: list[dict[str, Any]], name: str) -> None:
    rows, dtype, out_dtype, parts = CASES.SUMS[name]
    expected = _expected(name, rows, dtype, parts, range(WORLD)).to(out_dtype)
    for results in found:
        assert differing(results[name], expected) == 0
    swapped = _expected(name, rows, dtype, parts, (0, 2, 1, 3)).to(out_dtype)
    assert differing(swapped, expected) > 0, "ranks in another order must show"
    messages = [CASES.message(name, rank, rows, dtype) for rank in range(WORLD)]
    chain = reference.evaluate((((0, 1), 2), 3), messages).to(out_dtype)
    assert differing(chain, expected) > 0, "a chain must show"


@pytest.mark.parametrize("name", list(CASES.SCATTERS))
def test_reduce_scatter_is_the_rows_of_the_all_reduce(
    found: list[dict[str, Any]], name: str
) -> None:
    rows, dtype, out_dtype, parts = CASES.SCATTERS[name]
    expected = _expected(name, rows, dtype, parts, range(WORLD)).to(out_dtype)
    whole = torch.cat([results[name] for results in found])
    share = -(-rows // WORLD)
    assert whole.shape[0] == share * WORLD
    assert differing(whole[:rows], expected) == 0
    assert not whole[rows:].count_nonzero()


@pytest.mark.parametrize("contract", ["v1", "v2"])
@pytest.mark.parametrize("rows", CASES.ROW_ROWS)
def test_row_linear_over_ranks_equals_one_rank(
    found: list[dict[str, Any]], contract: str, rows: int
) -> None:
    x, weight, bias = (t.cuda() for t in CASES.row_operands(rows))
    reduction = CASES.reductions(WORLD)[contract]
    if contract == "v2":
        expected = row_linear(x, weight, bias, reduction=reduction)
    else:
        # The bias enters at the first rank of four: one process cannot take its place here.
        from sglang_patch.ops import row_linear_partial

        width = CASES.ROW_K // WORLD
        cuts = [slice(r * width, (r + 1) * width) for r in range(WORLD)]
        mine = [row_linear_partial(x[:, c], weight[:, c], reduction, WORLD).cpu() for c in cuts]
        expected = reference.combine(mine, bias.cpu(), WORLD)
    for results in found:
        assert differing(results[f"row_linear {contract} {rows}"], expected.cpu()) == 0


def test_replays_of_a_graph_go_on_where_the_calls_before_ended(found: list[dict[str, Any]]) -> None:
    for replay in range(CASES.REPLAYS):
        for call in range(CASES.GRAPH_CALLS):
            messages = [CASES.graph_message(replay, call, rank) for rank in range(WORLD)]
            expected = reference.combine(messages, None, 1).to(torch.bfloat16)
            for results in found:
                assert differing(results[f"graph {replay} {call}"], expected) == 0
                if call == 0:
                    assert differing(results[f"between {replay}"], expected) == 0


def test_the_intended_forms_ran(found: list[dict[str, Any]]) -> None:
    for results in found:
        assert results["transport"].startswith("symmetric memory")
        assert results["forms"] == {
            "one shot": 3 + 2 + 4 + CASES.REPLAYS,
            "two shots": 5 + 2 + 2,
            "scatter": len(CASES.SCATTERS),
        }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_tree_over_parts_in_one_process(count: int, dtype: torch.dtype) -> None:
    parts = [CASES.message("parts", rank, 77, dtype) for rank in range(count)]
    for bias_ranks in (1, 2, count):
        bias = CASES.bias()
        out = combine([p.cuda() for p in parts], bias.cuda(), bias_ranks, torch.bfloat16)
        expected = reference.combine(parts, bias, bias_ranks).to(torch.bfloat16)
        assert differing(out.cpu(), expected) == 0
