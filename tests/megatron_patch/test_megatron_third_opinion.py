"""The third opinion: every op, computed from stored inputs and the checkpoint, has the trainer's
bits, and a row that is one ulp off is the one that is blamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_models import TEMPERATURE, batch_for

from miles_launcher.parity.elements import StoredRow, stored_row
from miles_launcher.parity.flow import Place, data_flow, inputs_of
from miles_launcher.parity.rows import RankRecord
from miles_launcher.resolve import LaunchArgs, resolve
from miles_launcher.runtime.third_opinion import (
    Reference,
    can_judge,
    guilty_side,
    row_tensor,
)

FLOW = data_flow(4, qk_layernorm=True)
OUTPUTS = [place for place in FLOW if place.is_output and place.layer in (None, 0, 3)]
# A scored token in the middle of a response.
SEQUENCE, POSITION = 5, 14


@pytest.fixture(scope="module")
def records(ranks: Any, model_folder: Any) -> list[RankRecord]:
    """Two ranks' rows of one token, and of what entered attention for all before it."""
    token, before = [SEQUENCE, POSITION], [[SEQUENCE, p] for p in range(POSITION + 1)]
    keep = {
        "outputs": [token],
        "taps": {place.tap: before for place in FLOW if not place.is_output},
    }
    results = ranks.run(
        2, "head_tasks:kept_rows", str(model_folder("tiny")), "tiny", (2, 1, 1), json.dumps(keep)
    )
    return [RankRecord.of("trainer", r["tp_rank"], r["taps"]) for r in results]


@pytest.fixture(scope="module")
def reference(model_folder: Any) -> Reference:
    settings = (f"run.temperature={TEMPERATURE}",)
    plan = resolve(
        LaunchArgs(model="qwen3-tiny", tp=2, device="cpu", overrides=settings),
        {"MILES_HOME": "/models"},
    )
    return Reference(plan, Path(model_folder("tiny")))


def row(records: list[RankRecord], place: Place, position: int = POSITION) -> StoredRow:
    found = stored_row(records, place, [(SEQUENCE, position)])
    assert found is not None, place
    return found


@pytest.mark.parametrize("place", OUTPUTS, ids=str)
def test_every_op_has_the_trainers_bits_and_one_ulp_is_blamed(
    records: list[RankRecord], reference: Reference, place: Place
) -> None:
    tokens = batch_for("tiny").tokens[SEQUENCE]
    token = {"id": tokens[POSITION], "position": POSITION, "next": tokens[POSITION + 1]}
    inputs = {}
    for source in inputs_of(place):
        first = 0 if source.tensor in ("key", "value") else POSITION
        parts = [row_tensor(row(records, source, p)) for p in range(first, POSITION + 1)]
        inputs[source.tensor] = torch.stack(parts)
    if place.op == "logprob":
        expected = reference.logprob(inputs["output"], token)
    else:
        expected = reference.output(place, inputs, token)
    mine = row(records, place)
    assert guilty_side(expected, {"rollout": mine, "trainer": mine}) is None
    wrong = StoredRow(mine.size, {r: (c, b.copy()) for r, (c, b) in mine.ranks.items()})
    columns, bits = wrong.ranks[1]
    if len(bits):
        bits[len(bits) // 2] ^= 1
        found = guilty_side(expected, {"rollout": wrong, "trainer": mine})
        assert found == ("rollout", 1)
        assert guilty_side(expected, {"rollout": mine, "trainer": wrong}) == ("trainer", 1)
        assert guilty_side(expected, {"rollout": wrong, "trainer": wrong}) is None
    assert np.array_equal(columns, mine.ranks[1][0])


def test_on_a_gpu_no_product_is_judged() -> None:
    judged = {place.op for place in FLOW if can_judge(place, "cuda")}
    assert {"rope", "silu_mul", "input_layernorm", "temperature", "logprob"} <= judged
    assert not {"qkv_proj", "o_proj", "down_proj", "lm_head", "attention"} & judged
    assert all(can_judge(place, "cpu") == place.is_output for place in FLOW)
