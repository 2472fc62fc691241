"""Sums over memory that the ranks share, run by real processes under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_launcher.conformance.bits import differing
from sglang_patch.ops.tree_all_reduce import reference
from sglang_patch.ops.tree_all_reduce.kernel import _FEW
from sglang_patch.ops.tree_all_reduce.workspace import (
    ONE_SHOT_BYTES,
    STAGED_BYTES,
    WORLD_SIZES,
    Areas,
)

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def _module() -> Any:
    """The calls and messages of `interpreted_ranks.py`, read without its interpreter."""
    text = (HERE / "interpreted_ranks.py").read_text(encoding="utf-8")
    wanted = text[text.index("COLUMNS = 6") : text.index("def _call(")]
    names: dict[str, Any] = {"torch": torch}
    exec("from miles_launcher.conformance.bits import random\n" + wanted, names)
    return names


CASES = _module()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(HERE)])
    command = [sys.executable, "-W", "ignore", str(HERE / "interpreted_ranks.py"), str(folder)]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


def _expected(call: int, world: int, order: list[int]) -> torch.Tensor:
    """By the reference, from everybody's message."""
    out_dtype, span = CASES["CALLS"][call][3:]
    parts = [CASES["message"](call, rank) for rank in order]
    ranks = 1 if span < 0 else world // max(span, 1)
    return reference.combine(parts, CASES["bias_of"](call), ranks).to(out_dtype)


@pytest.mark.parametrize("world", [2, 4])
def test_every_form_has_the_reference_s_bits_on_every_rank(
    found: list[dict[Any, torch.Tensor]], world: int
) -> None:
    group, shown = {2: "two ranks", 4: "four ranks"}[world], 0
    for call, (form, rows, *_) in enumerate(CASES["CALLS"]):
        expected = _expected(call, world, list(range(world)))
        if world == 4:
            shown += int(differing(_expected(call, world, [0, 2, 1, 3]), expected) > 0)
            chain = ((((0, 1), 2), 3), [CASES["message"](call, rank) for rank in range(world)])
            shown += int(differing(reference.evaluate(*chain).to(expected.dtype), expected) > 0)
        if form == "scatter":
            share = CASES["share_of"](rows, world)
            expected = torch.cat([expected, expected.new_full((share * world - rows, 6), 7.0)])
        for rank in range(world):
            wanted = expected
            if form == "scatter":
                wanted = expected[rank * share : (rank + 1) * share]
            assert differing(found[rank][group, call], wanted) == 0, (call, rank)
    assert shown == (2 * len(CASES["CALLS"]) if world == 4 else 0), "inputs must show the order"
    # The programs of every launch counted alike, whether they took part or not.
    counted = [found[rank][group, "epochs"] for rank in range(world)]
    epochs = {int(e) for counters in counted for e in counters.unique()}
    assert epochs == {sum(1 if call[0] == "one" else 2 for call in CASES["CALLS"])}


def test_ranks_in_each_other_s_place_are_seen(found: list[dict[Any, torch.Tensor]]) -> None:
    group = "ranks in each other's place"
    wrong = [
        call
        for call in range(len(CASES["CALLS"]))
        if CASES["CALLS"][call][0] != "scatter"
        and differing(found[0][group, call], _expected(call, 4, [0, 1, 2, 3])) > 0
    ]
    assert len(wrong) == sum(call[0] != "scatter" for call in CASES["CALLS"])


def test_the_calls_reach_every_path_of_the_kernels() -> None:
    """More elements than one program takes, more than one round of programs is not needed here:
    `_FEW` is what a GPU takes too."""
    numbers = [rows * 6 for _, rows, *_ in CASES["CALLS"]]
    assert min(numbers) < _FEW[0] < max(numbers)
    spans = {call[4] for call in CASES["CALLS"]}
    assert spans == {0, 1, 2, -1}


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_areas_do_not_overlap_and_stay_aligned(world: int) -> None:
    areas = Areas(world, ONE_SHOT_BYTES[world], STAGED_BYTES)
    starts = [areas.received, areas.staged, areas.shared, areas.total]
    sizes = [2 * world * areas.one_shot_bytes, areas.staged_bytes, areas.staged_bytes // world]
    assert [b - a for a, b in zip(starts, starts[1:], strict=False)] == sizes
    assert all(start % 1024 == 0 for start in starts)
    assert areas.total <= 280 << 20


def test_other_worlds_and_sizes_are_refused() -> None:
    for world in (1, 3, 6, 16):
        with pytest.raises(ValueError, match=f"world size {world}"):
            Areas(world, 1 << 13, 1 << 16)
    with pytest.raises(ValueError, match="multiples"):
        Areas(4, 1000, 1 << 16)
