"""Known mistakes, made in the trainer's code: the comparison names the op in which each one is."""

from __future__ import annotations

from typing import Any

import pytest
from code_faults import FAULTS
from megatron_models import SHAPES, V1, V2

from miles_launcher.parity.bisect import Comparison, Flow, compare_rows
from miles_launcher.parity.flow import Place, data_flow
from miles_launcher.parity.rows import RankRecord, TokenSlots

NAME = "small"

# fault: (contract, layout of the faulty trainer, where it is, whether o_proj has a bias)
CASES: dict[str, tuple[str, tuple[int, int, int], Place, bool]] = {
    # Six tiles: three and three to the rollout, four and two to a plain tree.
    "plain_tree": (V1, (1, 1, 1), Place(0, "down_proj"), False),
    "bias_after_the_reduce": (V2, (2, 1, 1), Place(0, "o_proj"), True),
    "rope_table_in_bf16": (V2, (1, 1, 2), Place(0, "rope"), False),
    "logits_through_bf16": (V2, (2, 1, 1), Place(None, "temperature"), False),
    "pad_rows_in_the_softmax": (V2, (2, 1, 1), Place(None, "logprob"), False),
    "residual_rounded_at_the_stage_boundary": (
        V2,
        (1, 2, 1),
        Place(1, "input_layernorm", "input"),
        False,
    ),
    "norm_weight_before_the_rounding": (V2, (2, 1, 1), Place(0, "input_layernorm"), False),
    "stale_weights_on_one_rank": (V2, (2, 1, 1), Place(1, "gate_up_proj"), False),
}


def run(
    ranks: Any, folder: Any, contract: str, layout: Any, fault: str | None, biased: bool
) -> list[dict[str, Any]]:
    world = layout[0] * layout[1] * layout[2]
    return ranks.run(
        world,
        "code_faults:taps_with_a_code_fault",
        str(folder(NAME)),
        NAME,
        layout,
        {"contract": contract, "segments": 4 if contract == V2 else 1},
        fault,
        biased,
    )


def compared(clean: list[dict[str, Any]], other: list[dict[str, Any]], tp: int) -> Comparison:
    shape = SHAPES[NAME]
    layers, norms = shape.num_hidden_layers, shape.qk_layernorm
    return compare_rows(
        [RankRecord.of("rollout", r["tp_rank"], r["taps"]) for r in clean],
        [RankRecord.of("trainer", r["tp_rank"], r["taps"]) for r in other],
        (1, tp),
        Flow(data_flow(layers, norms), layers, norms),
        TokenSlots(clean[0]["tokens"], clean[0]["prompt_lengths"]),
    )


@pytest.fixture(scope="module")
def single(ranks: Any, model_folder: Any) -> Any:
    """What one rank records without a fault, made once for each contract and bias."""
    made: dict[tuple[str, bool], Any] = {}

    def of(contract: str, biased: bool) -> Any:
        if (contract, biased) not in made:
            made[contract, biased] = run(ranks, model_folder, contract, (1, 1, 1), None, biased)
        return made[contract, biased]

    return of


def test_every_fault_has_a_case() -> None:
    assert set(CASES) == set(FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_in_the_code_is_found_where_it_is(
    ranks: Any, model_folder: Any, single: Any, fault: str
) -> None:
    contract, layout, place, biased = CASES[fault]
    clean = single(contract, biased)
    sound = run(ranks, model_folder, contract, layout, None, biased)
    assert compared(clean, sound, layout[0]).found is None, "the fault alone makes the difference"
    faulty = run(ranks, model_folder, contract, layout, fault, biased)
    assert all(r["calls"] for r in faulty)
    result = compared(clean, faulty, layout[0])
    assert result.found is not None, "nothing was found"
    assert result.found.place == place
    assert result.found.sources_equal
    assert result.found.inputs_equal is place.is_output
    # The rounding of the stream is carried wrongly; every other fault is in an op.
    assert all(op.differ == 0 for op in result.ops[: result.ops.index(_row(result, place))])


def _row(result: Comparison, place: Place) -> Any:
    return next(op for op in result.ops if op.place == place)
