"""Taps of the trainer over real gloo ranks: the same rows at every layout, and no bit changed.

(That a fault at each of them is found: `miles bisect --sweep`, tests/parity/test_bisect.py.)
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from megatron_models import SHAPES, batch_for

from miles_launcher.parity.bisect import Flow, compare_rows
from miles_launcher.parity.flow import data_flow
from miles_launcher.parity.rows import RankRecord, TokenSlots

LAYOUTS = [(2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)]


def run(ranks: Any, model_folder: Any, name: str, layout: Any) -> list[Any]:
    world = layout[0] * layout[1] * layout[2]
    folder = str(model_folder(name))
    return ranks.run(world, "tapped_scores", folder, name, layout, {})


def records(results: list[dict[str, Any]]) -> list[RankRecord]:
    return [RankRecord.of("trainer", r["tp_rank"], r["taps"]) for r in results]


@cache
def slots(name: str) -> TokenSlots:
    batch = batch_for(name)
    return TokenSlots(batch.tokens, batch.prompt_lengths)


def flow(name: str) -> Flow:
    shape = SHAPES[name]
    places = data_flow(shape.num_hidden_layers, shape.qk_layernorm)
    return Flow(places, shape.num_hidden_layers, shape.qk_layernorm)


@pytest.fixture(scope="module")
def single(ranks: Any, model_folder: Any) -> Any:
    """One rank's record of each model, made once."""
    made: dict[str, list[RankRecord]] = {}

    def of(name: str) -> list[RankRecord]:
        if name not in made:
            made[name] = records(run(ranks, model_folder, name, (1, 1, 1)))
        return made[name]

    return of


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("small", layout) for layout in LAYOUTS),
        ("bias", (2, 1, 1)),
        ("shared_kv", (4, 1, 1)),
        ("untied", (2, 1, 1)),
    ],
    ids=str,
)
def test_rows_are_the_same_at_every_layout_and_taps_change_no_bits(
    ranks: Any, model_folder: Any, single: Any, name: str, layout: tuple[int, int, int]
) -> None:
    results = run(ranks, model_folder, name, layout)
    for result in results:
        plain, tapped = np.concatenate(result["plain"]), np.concatenate(result["tapped"])
        assert plain.size and np.array_equal(plain.view(np.int32), tapped.view(np.int32))
    result = compare_rows(single(name), records(results), (1, layout[0]), flow(name), slots(name))
    assert result.found is None, result.found
    assert len(result.ops) == len(flow(name).places)
    assert all(op.compared > 0 for op in result.ops)
