"""From rank records to the first divergence: order, shards, caches, ranks, and what is missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from miles_launcher.faults import FINAL_OPS, LAYER_OPS
from miles_launcher.parity.bisect import (
    Comparison,
    Flow,
    Found,
    compare_rows,
    first_divergence,
    heat_map,
    sentence,
)
from miles_launcher.parity.elements import (
    StoredRow,
    differing,
    first_element,
    stored_row,
    ulp_distance,
    ulp_histogram,
)
from miles_launcher.parity.flow import (
    INPUTS,
    SCORED_OPS,
    Place,
    data_flow,
    inputs_of,
    made_of,
)
from miles_launcher.parity.rows import KeptRows, RankRecord, TapRows, TokenSlots
from sglang_patch.ops import tap_layout

# Two sequences with a prefix of two tokens in common; three and two tokens of prompt.
TOKENS = [[5, 6, 7, 8, 9], [5, 6, 3, 4]]
SLOTS = TokenSlots(TOKENS, [3, 2])
FLOW = Flow(data_flow(2, qk_layernorm=True), 2, True)
SIDES = ("rollout", "trainer")
WHOLE_OPS = {op for op in (*LAYER_OPS, *FINAL_OPS) if tap_layout.layout_of(op) in tap_layout.WHOLE}


def is_whole(place: Place) -> bool:
    return tap_layout.layout_of(place.op, place.tensor) in tap_layout.WHOLE


def digest(place: Place, sequence: int, position: int) -> int:
    """Any number that depends on the place and on the tokens so far (and the next, if scored)."""
    scored = place.op in SCORED_OPS
    return hash((place.tap, *TOKENS[sequence][: position + 1 + scored])) >> 2


def record(side: str, rank: int = 0, size: int = 1) -> RankRecord:
    """An equal side: whole rows on every rank, shards that add up to the digest. One pass with all
    tokens, and the head's rows of it."""
    fed = np.array([SLOTS.token(int(s)) for s in np.flatnonzero(SLOTS.needed(FLOW.places[0]))])
    head = np.array([SLOTS.token(int(s)) for s in np.flatnonzero(SLOTS.needed(FLOW.places[-1]))])
    taps = {}
    for place in FLOW.places:
        scored = place.op in SCORED_OPS
        values = []
        for token in head if scored else fed:
            value = digest(place, *token)
            if not is_whole(place) and size > 1:
                value = value - 12345 if rank == 0 else (12345 if rank == 1 else 0)
            values.append(value)
        spans = np.array([[2 if scored else 0, 0, 0, len(values)]])
        taps[place.tap] = TapRows(is_whole(place), spans, np.array(values, dtype=np.int64))
    passes = {"tokens": [fed], "head": [head], "scored": [head], "prompt": [head[:0]]}
    return RankRecord(side, rank, passes, taps, {})


def where(record: RankRecord, tap: str, sequence: int, position: int) -> int:
    tokens, _, _ = record.located(tap)
    (index,) = np.flatnonzero((tokens == (sequence, position)).all(axis=1))
    return int(index)


def change(records: list[RankRecord], rank: int, tap: str, sequence: int, position: int) -> None:
    index = where(records[rank], tap, sequence, position)
    records[rank].taps[tap].digests[index] += 1


def sides(rollout_tp: int = 1, trainer_tp: int = 1) -> tuple[list[RankRecord], list[RankRecord]]:
    return (
        [record("rollout", rank, rollout_tp) for rank in range(rollout_tp)],
        [record("trainer", rank, trainer_tp) for rank in range(trainer_tp)],
    )


def compared(rollout: list[RankRecord], trainer: list[RankRecord]) -> Comparison:
    sizes = (
        1 + max(r.tp_rank for r in rollout),
        1 + max(r.tp_rank for r in trainer),
    )
    return compare_rows(rollout, trainer, sizes, FLOW, SLOTS)


def found(rollout: list[RankRecord], trainer: list[RankRecord]) -> Found | None:
    return compared(rollout, trainer).found


def test_the_flow_names_every_fault_place_and_input_once_and_as_the_engines_do() -> None:
    places = FLOW.places
    assert len(set(places)) == len(places)
    outputs = [place for place in places if place.is_output]
    assert len(outputs) == 2 * len(LAYER_OPS) + len(FINAL_OPS)
    assert places[0] == Place(None, "embedding") and places[-1] == Place(None, "logprob")
    assert {op: set(names) for op, names in INPUTS.items()} == {
        op: set(names) for op, names in tap_layout.INPUTS.items()
    }
    assert not {"q_norm", "k_norm"} & {place.op for place in data_flow(2, qk_layernorm=False)}


@pytest.mark.parametrize("qk_layernorm", [True, False])
def test_what_a_tensor_is_made_of_comes_before_it(qk_layernorm: bool) -> None:
    flow = Flow(data_flow(2, qk_layernorm), 2, qk_layernorm)
    order = {place: number for number, place in enumerate(flow.places)}
    for place in flow.places:
        sources = inputs_of(place) if place.is_output else made_of(place, 2, qk_layernorm)
        assert sources == flow.sources(place), "every source is tapped"
        assert all(order[source] < order[place] for source in sources)
        assert sources or place.op == "embedding"
    assert made_of(Place(1, "input_layernorm", "input"), 2, True) == (
        Place(0, "down_proj"),
        Place(0, "post_attention_layernorm", "input"),
    )


@pytest.mark.parametrize(("rollout_tp", "trainer_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_equal_sides_have_no_divergence(rollout_tp: int, trainer_tp: int) -> None:
    result = compared(*sides(rollout_tp, trainer_tp))
    assert result.found is None and not result.wrong and len(result.ops) == len(FLOW.places)
    assert {op.compared for op in result.ops if op.place.op not in SCORED_OPS} == {4 + 3}
    assert {op.compared for op in result.ops if op.place.op in SCORED_OPS} == {2 + 2}


def test_the_op_comes_first_then_the_position_then_the_sequence() -> None:
    rollout, trainer = sides(2, 2)
    change(rollout, 1, "1.rope.output", 0, 0)
    change(rollout, 1, "0.silu_mul.output", 0, 3)
    change(trainer, 0, "0.silu_mul.output", 1, 2)
    change(trainer, 0, "0.silu_mul.output", 0, 2)
    first = found(rollout, trainer)
    assert first is not None
    assert (first.place, first.sequence, first.position) == (Place(0, "silu_mul"), 0, 2)
    assert (first.differ, first.compared, first.inputs_equal) == (3, 7, True)
    assert first.odd is None, "shards say nothing about who is right"
    data = first_divergence(first, SLOTS, None)
    assert data["token"] == {"sequence": 0, "position": 2, "id": 7, "part": "prompt"}
    assert "its inputs are equal: silu_mul is at fault" in sentence(data, SIDES)


def test_an_input_that_differs_blames_what_carries_it() -> None:
    """What the stage before sent is equal, what this one got is not."""
    rollout, trainer = sides(1, 1)
    change(trainer, 0, "1.input_layernorm.input", 1, 1)
    change(trainer, 0, "1.input_layernorm.output", 1, 1)
    first = found(rollout, trainer)
    assert first is not None and first.place == Place(1, "input_layernorm", "input")
    assert first.sources_equal and not first.inputs_equal
    data = first_divergence(first, SLOTS, None)
    assert [source["equal"] for source in data["inputs"]] == [True, True]
    text = sentence(data, SIDES)
    assert "what carries them into input_layernorm is at fault" in text
    assert "layer 0 down_proj and input of layer 0 post_attention_layernorm are equal" in text


def test_attention_reads_the_keys_of_earlier_tokens() -> None:
    """A key that differs is found as such; `inputs` says so of the tokens after it too."""
    rollout, trainer = sides(1, 1)
    change(trainer, 0, "0.attention.key", 0, 1)
    change(trainer, 0, "0.attention.output", 0, 3)
    result = compared(rollout, trainer)
    assert result.found is not None and result.found.place == Place(0, "attention", "key")
    result.ops = [op for op in result.ops if op.place == Place(0, "attention")]
    wrong = result.wrong
    assert wrong[Place(0, "attention", "key")].sum() == 1
    assert set(wrong) == {Place(0, "attention", "key"), Place(0, "attention")}


def test_a_replica_unlike_all_others_names_its_side_and_rank() -> None:
    rollout, trainer = sides(2, 2)
    change(trainer, 1, "1.o_proj.output", 1, 0)
    first = found(rollout, trainer)
    assert first is not None and first.odd == ("trainer", 1)
    data = first_divergence(first, SLOTS, None)
    assert (data["side"], data["rank"], data["judged_by"]) == ("trainer", 1, "ranks")
    assert "trainer rank 1 is unlike every other rank" in sentence(data, SIDES)


def test_cached_prefix_tokens_have_the_digest_of_the_sequence_that_computed_them() -> None:
    rollout, trainer = sides()
    fed = rollout[0].passes["tokens"][0]
    cached = (fed[:, 0] == 1) & (fed[:, 1] < 2)
    rollout[0].passes["tokens"][0][cached, 0] = -1
    assert found(rollout, trainer) is None
    change(rollout, 0, "0.rope_k.output", 0, 1)
    first = found(rollout, trainer)
    assert first is not None and (first.sequence, first.position, first.differ) == (0, 1, 2)
    assert SLOTS.same_prefix(first.slot) == [(0, 1), (1, 1)]


def test_a_token_computed_past_the_end_of_its_sequence_does_not_count() -> None:
    """The engine runs ahead; the row must not land on the next sequence's first token."""
    rollout, trainer = sides()
    for tap in rollout[0].taps.values():
        if tap.spans[0, 0] == 0:
            tap.spans[0, 3] += 1
            tap.digests.resize(len(tap.digests) + 1, refcheck=False)
            tap.digests[-1] = 99
    rollout[0].passes["tokens"][0] = np.concatenate(
        (rollout[0].passes["tokens"][0], [[0, len(TOKENS[0])]])
    )
    assert found(rollout, trainer) is None


@pytest.mark.parametrize("tap", ["1.rope.output", "final.logprob.output"])
def test_a_missing_row_or_rank_is_an_error_that_names_it(tap: str) -> None:
    rollout, trainer = sides()
    rows = rollout[0].taps[tap]
    rows.spans[0, 3] -= 1
    with pytest.raises(ValueError, match=rf"rollout rank 0: {tap} has . digests of . rows"):
        found(rollout, trainer)
    taps: Any = rollout[0].taps
    taps[tap] = TapRows(rows.whole, rows.spans, rows.digests[:-1])
    with pytest.raises(ValueError, match="rollout: rank 0 recorded .* sequence 1 position 2"):
        found(rollout, trainer)
    rows.spans[0, 3] += 40
    with pytest.raises(ValueError, match="has 4. rows of pass 0, which has"):
        found(rollout, trainer)
    trainer_taps: Any = trainer[0].taps
    del trainer_taps["0.attention.output"]
    with pytest.raises(ValueError, match="trainer: .* rank 0 recorded no rows of layer 0 attent"):
        found(sides()[0], trainer)
    with pytest.raises(ValueError, match="trainer rank 3: not a record of taps"):
        RankRecord.of("trainer", 3, {"taps": {}})


def test_nothing_to_compare_is_an_error() -> None:
    slots = TokenSlots([[1, 2]], [2])
    ours = [record("rollout"), record("trainer")]
    ours = [
        RankRecord(
            r.side,
            0,
            {name: [np.array([[0, 0]])] for name in r.passes},
            {
                tap: TapRows(rows.whole, np.array([[0, 0, 0, 1]]), rows.digests[:1])
                for tap, rows in r.taps.items()
            },
            {},
        )
        for r in ours
    ]
    with pytest.raises(ValueError, match="lm_head: no token row to compare"):
        compare_rows(ours[:1], ours[1:], (1, 1), FLOW, slots)


def test_the_heat_map_counts_tensors_by_layer() -> None:
    rollout, trainer = sides()
    for tap in ("0.silu_mul.output", "0.down_proj.input", "1.rope.output"):
        change(rollout, 0, tap, 0, 2)
    change(rollout, 0, "final.logprob.output", 1, 1)
    heat = heat_map(compared(rollout, trainer), 2, SLOTS)
    assert heat["layers"] == ["embedding", 0, 1, "head"]
    by_token = dict(zip(map(tuple, heat["tokens"]), heat["rows_differ"], strict=True))
    assert by_token.pop((0, 2)) == [0, 2, 1, 0]
    assert by_token.pop((1, 1)) == [0, 0, 0, 1]
    assert len(by_token) == 5 and not any(sum(counts) for counts in by_token.values())


def kept(side: str, rank: int, columns: list[int], bits: list[int]) -> RankRecord:
    row = KeptRows(
        np.array(columns), np.array([[0, 4]]), np.array([bits], dtype=np.uint16).view(np.int16)
    )
    return RankRecord(side, rank, {}, {}, {"1.o_proj.output": row})


def test_the_first_element_over_different_shards() -> None:
    rollout = [
        kept("rollout", 0, [0, 1], [10, 11]),
        kept("rollout", 1, [2, 3], [0x3F80, 0x3F90]),
    ]
    trainer = [kept("trainer", 0, [3, 2, 0, 1, -1], [0x3F91, 0x3F81, 10, 11, 99])]
    place, token = Place(1, "o_proj"), [(7, 7), (0, 4)]
    ours, theirs = stored_row(rollout, place, token), stored_row(trainer, place, token)
    assert ours is not None and theirs is not None
    data = first_element(ours, theirs, SIDES)
    assert data is not None and data["bits"] == {"rollout": "3f80", "trainer": "3f81"}
    assert data["ulp"] == 1
    assert data["element"] == {
        "column": 2,
        "dtype": "bfloat16",
        "ranks": {"rollout": 1, "trainer": 0},
        "differ": 2,
        "of": 4,
    }
    assert first_element(ours, ours, SIDES) is None
    assert stored_row(rollout, place, [(0, 5)]) is None
    wide = StoredRow(4, {0: (np.array([0]), np.array([1]))})
    with pytest.raises(ValueError, match="rows of 2 bytes an element, and of 4"):
        differing(ours, wide)


def test_copies_of_a_whole_row_are_all_compared() -> None:
    trainer = [kept("trainer", rank, [0, 1], [10, 11 + (rank == 2)]) for rank in range(3)]
    ours = stored_row([kept("rollout", 0, [0, 1], [10, 11])], Place(1, "o_proj"), [(0, 4)])
    theirs = stored_row(trainer, Place(1, "o_proj"), [(0, 4)])
    assert ours is not None and theirs is not None
    data = first_element(ours, theirs, SIDES)
    assert data is not None and data["element"]["ranks"] == {"rollout": 0, "trainer": 2}


def test_ulps_count_steps_across_zero() -> None:
    assert ulp_distance(0x3F80, 0x3F81, 2) == 1
    assert ulp_distance(0x0001, 0x8001, 2) == 2
    assert ulp_distance(0x0000, 0x8000, 2) == 0
    assert ulp_distance(0x7F80, 0x3F80, 2) is None
    assert ulp_distance(0x3F800000, 0x3F7FFFFF, 4) == 1


def test_the_histogram_counts_every_differing_element_once() -> None:
    def row(*bits: int) -> StoredRow:
        return StoredRow(2, {0: (np.arange(len(bits)), np.array(bits))})

    ours = row(0x3F80, 0x3F80, 0x3F80, 0x3F80, 0x0000, 0x7FC0, 0x3F80)
    theirs = row(0x3F80, 0x3F81, 0x3F82, 0x3F85, 0x8000, 0x3F80, 0x3F81)
    histogram = ulp_histogram(Place(None, "lm_head"), [(ours, theirs), (ours, ours)])
    assert histogram is not None
    assert histogram["buckets"] == [[0, 0, 1], [1, 1, 2], [2, 3, 1], [4, 7, 1]]
    assert (histogram["rows"], histogram["elements"]) == (2, 14)
    assert (histogram["differ"], histogram["not_numbers"]) == (6, 1)
    assert ulp_histogram(Place(None, "lm_head"), []) is None
