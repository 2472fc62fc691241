"""Taps of the trainer over real gloo ranks: the same rows at every layout, and every fault found.

The sweep flips one ulp of one row at every tap and asks the comparison of `miles bisect` where the
first difference is: it must name that op, layer and token, and nothing else.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from megatron_models import SHAPES, batch_for

from megatron_patch.ops.fault import FINAL_OPS, LAYER_OPS
from megatron_patch.parallel import pack
from miles_launcher.parity.bisect import Flow, compare_rows
from miles_launcher.parity.flow import SCORED_OPS, Place, data_flow
from miles_launcher.parity.rows import RankRecord, TokenSlots

LAYOUTS = [(2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)]
ROW = 2


def run(ranks: Any, model_folder: Any, name: str, layout: Any, places: Any = ()) -> list[Any]:
    world = layout[0] * layout[1] * layout[2]
    folder = str(model_folder(name))
    return ranks.run(world, "tapped_scores", folder, name, layout, {}, tuple(places))


def records(results: list[dict[str, Any]], number: int | None = None) -> list[RankRecord]:
    return [
        RankRecord.of("trainer", r["tp_rank"], r["taps"] if number is None else r["faulty"][number])
        for r in results
    ]


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


def first_token(place: Place, name: str, cp: int) -> tuple[int, int]:
    """The (position, sequence) that comes first among the rows number `ROW` of every micro-batch
    on every context-parallel rank."""
    batch, table = batch_for(name), slots(name)
    tokens = []
    for start in range(0, len(batch), 4):
        for rank in range(cp):
            micro = pack(
                batch.tokens[start : start + 4],
                batch.prompt_lengths[start : start + 4],
                temperature=1.0,
                device=torch.device("cpu"),
                cp_size=cp,
                cp_rank=rank,
                first_sequence=start,
            )
            scored = place.op in SCORED_OPS
            row = int(micro.scored[: micro.num_scored][ROW]) if scored else ROW
            tokens.append((int(micro.positions[row]), int(micro.sequences[row])))
    needed = table.needed(place)
    return min(t for t in tokens if t[1] >= 0 and needed[table.starts[t[1]] + t[0]])


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_a_fault_at_any_tap_is_named_exactly(
    ranks: Any, model_folder: Any, single: Any, layout: tuple[int, int, int]
) -> None:
    wanted = [Place(layer, op) for layer in (0, 1) for op in LAYER_OPS]
    wanted += [Place(None, op) for op in FINAL_OPS]
    # On the last tensor-parallel rank; the head's largest logit may be on any, so on the first.
    places = [
        f"{'final' if place.layer is None else place.layer}:{place.op}"
        f":{0 if place.layer is None else layout[0] - 1}:{ROW}"
        for place in wanted
    ]
    results = run(ranks, model_folder, "small", layout, places)
    wrong = []
    for number, place in enumerate(wanted):
        found = compare_rows(
            single("small"), records(results, number), (1, layout[0]), flow("small"), slots("small")
        ).found
        token = first_token(place, "small", layout[2])
        if found is None or (found.place, (found.position, found.sequence)) != (place, token):
            wrong.append((place, token, found))
        elif not found.inputs_equal:
            wrong.append((place, "inputs", found))
        elif layout[0] > 1 and place.op in ("o_proj", "down_proj", "input_layernorm"):
            # Three copies of the row: the single rank's and the two here, of which one is unlike.
            if found.odd != ("trainer", layout[0] - 1):
                wrong.append((place, "odd", found))
    assert not wrong, wrong
