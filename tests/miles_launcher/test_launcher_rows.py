"""From rank records to the first divergence: order, shards, caches, ranks, and what is missing."""

from __future__ import annotations

import numpy as np
import pytest

from miles_launcher.faults import FINAL_OPS, LAYER_OPS
from miles_launcher.parity.bisect import (
    Found,
    compare_rows,
    divergence_data,
    first_element,
    kept_rows,
    sentence,
    ulp_distance,
)
from miles_launcher.parity.rows import (
    SCORED_OPS,
    WHOLE_OPS,
    Place,
    RankRecord,
    TokenSlots,
    data_flow,
)

# Two sequences with a prefix of two tokens in common; three and two tokens of prompt.
TOKENS = [[5, 6, 7, 8, 9], [5, 6, 3, 4]]
SLOTS = TokenSlots(TOKENS, [3, 2])
FLOW = data_flow(2, qk_layernorm=True)


def digest(place: Place, sequence: int, position: int) -> int:
    """Any number that depends on the place and on the tokens so far (and the next, if scored)."""
    scored = place.op in SCORED_OPS
    return hash((place.tap, *TOKENS[sequence][: position + 1 + scored])) >> 2


def record(side: str, rank: int = 0, size: int = 1) -> RankRecord:
    """An equal side: whole rows on every rank, shards that add up to the digest."""
    taps = {}
    for place in FLOW:
        rows = []
        for slot in np.flatnonzero(SLOTS.needed(place)):
            token = SLOTS.token(int(slot))
            value = digest(place, *token)
            if place.op not in WHOLE_OPS and size > 1:
                value = value - 12345 if rank == 0 else (12345 if rank == 1 else 0)
            rows.append([*token, value])
        taps[place.tap] = np.array(rows, dtype=np.int64)
    return RankRecord(side, rank, taps)


def change(records: list[RankRecord], rank: int, tap: str, sequence: int, position: int) -> None:
    rows = records[rank].taps[tap]
    where = (rows[:, 0] == sequence) & (rows[:, 1] == position)
    assert where.sum() == 1
    rows[where, 2] += 1


def sides(rollout_tp: int = 1, trainer_tp: int = 1) -> tuple[list[RankRecord], list[RankRecord]]:
    return (
        [record("rollout", rank, rollout_tp) for rank in range(rollout_tp)],
        [record("trainer", rank, trainer_tp) for rank in range(trainer_tp)],
    )


def found(rollout: list[RankRecord], trainer: list[RankRecord]) -> Found | None:
    sizes = (
        1 + max(r.tp_rank for r in rollout),
        1 + max(r.tp_rank for r in trainer),
    )
    return compare_rows(rollout, trainer, sizes, FLOW, SLOTS)[1]


def test_the_flow_names_every_fault_place_once() -> None:
    names = [(place.layer, place.op) for place in FLOW]
    assert len(set(names)) == len(names) == 2 * len(LAYER_OPS) + len(FINAL_OPS)
    assert names[0] == (None, "embedding") and names[-1] == (None, "logprob")
    assert not {"q_norm", "k_norm"} & {place.op for place in data_flow(2, qk_layernorm=False)}


@pytest.mark.parametrize(("rollout_tp", "trainer_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_equal_sides_have_no_divergence(rollout_tp: int, trainer_tp: int) -> None:
    rollout, trainer = sides(rollout_tp, trainer_tp)
    ops, first = compare_rows(rollout, trainer, (rollout_tp, trainer_tp), FLOW, SLOTS)
    assert first is None and len(ops) == len(FLOW)
    assert {op.compared for op in ops if op.place.op not in SCORED_OPS} == {4 + 3}
    assert {op.compared for op in ops if op.place.op in SCORED_OPS} == {2 + 2}


def test_the_op_comes_first_then_the_position_then_the_sequence() -> None:
    rollout, trainer = sides(2, 2)
    change(rollout, 1, "1.rope", 0, 0)
    change(rollout, 1, "0.silu_mul", 0, 3)
    change(trainer, 0, "0.silu_mul", 1, 2)
    change(trainer, 0, "0.silu_mul", 0, 2)
    first = found(rollout, trainer)
    assert first is not None
    assert (first.place, first.sequence, first.position) == (Place(0, "silu_mul"), 0, 2)
    assert (first.differ, first.compared, first.inputs_equal) == (3, 7, True)
    assert first.odd is None, "shards say nothing about who is right"
    assert "silu_mul is at fault" in sentence(first, None)


def test_a_replica_unlike_all_others_names_its_side_and_rank() -> None:
    rollout, trainer = sides(2, 2)
    change(trainer, 1, "1.o_proj", 1, 0)
    first = found(rollout, trainer)
    assert first is not None and first.odd == ("trainer", 1)
    assert divergence_data(first, None)["side"] == "trainer"


def test_cached_prefix_tokens_have_the_digest_of_the_sequence_that_computed_them() -> None:
    rollout, trainer = sides()
    for place in FLOW:
        if place.op not in SCORED_OPS:
            rows = rollout[0].taps[place.tap]
            cached = (rows[:, 0] == 1) & (rows[:, 1] < 2)
            rollout[0].taps[place.tap] = rows[~cached]
    assert found(rollout, trainer) is None
    change(rollout, 0, "0.rope_k", 0, 1)
    first = found(rollout, trainer)
    assert first is not None and (first.sequence, first.position, first.differ) == (0, 1, 2)
    assert SLOTS.same_prefix(first.slot) == [(0, 1), (1, 1)]


@pytest.mark.parametrize("tap", ["1.rope", "final.logprob"])
def test_a_missing_row_or_rank_is_an_error_that_names_it(tap: str) -> None:
    rollout, trainer = sides()
    rollout[0].taps[tap] = rollout[0].taps[tap][:-1]
    with pytest.raises(ValueError, match="rollout: rank 0 recorded .* sequence 1 position 2"):
        found(rollout, trainer)
    del trainer[0].taps["0.attention"]
    with pytest.raises(ValueError, match="trainer: .* rank 0 recorded no rows of layer 0 attent"):
        found(sides()[0], trainer)


def test_nothing_to_compare_is_an_error() -> None:
    slots = TokenSlots([[1, 2]], [2])
    rows = {p.tap: np.array([[0, 0, 1]], dtype=np.int64) for p in FLOW}
    sides_ = [RankRecord("rollout", 0, rows)], [RankRecord("trainer", 0, rows)]
    with pytest.raises(ValueError, match="lm_head: no token row to compare"):
        compare_rows(*sides_, (1, 1), FLOW, slots)


def kept(side: str, rank: int, columns: list[int], bits: list[int]) -> RankRecord:
    return RankRecord(side, rank, {"row.2.0.4": np.array([columns, bits], dtype=np.int64)})


def test_the_first_element_over_different_shards() -> None:
    rollout = [
        kept("rollout", 0, [0, 1], [10, 11]),
        kept("rollout", 1, [2, 3], [0x3F80, 0x3F90]),
    ]
    trainer = [kept("trainer", 0, [3, 2, 0, 1, -1], [0x3F91, 0x3F81, 10, 11, 99])]
    token = [(0, 4)]
    element = first_element(kept_rows(rollout, token), kept_rows(trainer, token))
    assert element is not None
    assert (element.column, element.rollout_bits, element.trainer_bits) == (2, "3f80", "3f81")
    assert (element.ulp, element.rollout_rank, element.trainer_rank) == (1, 1, 0)
    assert (element.elements_differ, element.elements, element.dtype) == (2, 4, "bfloat16")
    same = kept_rows(rollout, token)
    assert first_element(same, same) is None
    with pytest.raises(ValueError, match="rollout: the second pass stored none"):
        kept_rows(rollout, [(0, 5)])


def test_ulps_count_steps_across_zero() -> None:
    assert ulp_distance(0x3F80, 0x3F81, 2) == 1
    assert ulp_distance(0x0001, 0x8001, 2) == 2
    assert ulp_distance(0x0000, 0x8000, 2) == 0
    assert ulp_distance(0x7F80, 0x3F80, 2) is None
    assert ulp_distance(0x3F800000, 0x3F7FFFFF, 4) == 1
