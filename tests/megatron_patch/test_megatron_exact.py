"""Logprobs over real gloo ranks against the plain-PyTorch oracle, bit for bit.

Every equality is on int32 views of all scored tokens; each case shows that another order of the
same sums gives other bits, and that the trainer took the intended path as often as it has layers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import megatron_oracle as oracle
import numpy as np
import pytest
from megatron_models import SHAPES, V1, V2, batch_for, weights

from megatron_patch.schema import row_reduction
from megatron_patch.schema.reduction import balanced

LAYOUTS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)]


def bits(scores: list[np.ndarray]) -> np.ndarray:
    flat = np.concatenate(scores)
    assert flat.dtype == np.float32
    assert flat.size > 0, "compared nothing"
    return flat.view(np.int32)


@cache
def expected(name: str, contract: str, segments: int, rollout_tp: int = 1) -> np.ndarray:
    return bits(
        oracle.contract_scores(name, weights(name), batch_for(name), contract, segments, rollout_tp)
    )


def run(ranks: Any, model_folder: Any, name: str, layout: tuple[int, int, int], **options: Any):  # noqa: ANN201
    want = options.pop("want", ())
    world = layout[0] * layout[1] * layout[2]
    folder = str(model_folder(name))
    return ranks.run(world, "score_and_train", folder, name, layout, options, want)


def assert_path_ran(results: list[dict[str, Any]], name: str, layout: Any, path: str) -> None:
    tp, pp, _ = layout
    micro_batches = -(-len(batch_for(name)) // 4)
    layers = SHAPES[name].num_hidden_layers // pp
    for rank, result in enumerate(results):
        calls = result["readback"]["op_calls"]
        assert calls[f"row_linear:{path}"] == 2 * layers * micro_batches
        assert calls["attention"] == layers * micro_batches
        last = result["readback"]["pp_rank"] == pp - 1
        assert calls["rms_norm"] == (2 * layers + last) * micro_batches, rank
        qk_norm = SHAPES[name].qk_layernorm
        for op, ran in (("qk_norm_rope", qk_norm), ("rope", not qk_norm)):
            assert calls.get(op, 0) == (layers * micro_batches if ran else 0), (rank, op)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "tp{}-pp{}-cp{}".format(*x))
def test_v2_equals_the_oracle_at_every_layout(ranks, model_folder, layout) -> None:
    wanted = expected("tiny", V2, 4)
    assert (wanted != expected("tiny", V2, 1)).any(), "vacuous: the order of the sums never shows"
    results = run(ranks, model_folder, "tiny", layout, segments=4)
    for rank, result in enumerate(results):
        assert np.array_equal(bits(result["scores"]), wanted), f"rank {rank}"
    assert_path_ran(results, "tiny", layout, "segments")
    digests = {r["readback"]["fingerprint"]["digest"] for r in results}
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("untied", (2, 2, 1)),
        ("small", (1, 2, 2)),
        ("bias", (2, 1, 1)),
        ("shared_kv", (4, 1, 1)),
        ("shared_kv", (2, 1, 2)),
        ("shared_kv", (1, 1, 4)),
    ],
)
def test_v2_tied_untied_bias_and_shared_kv_heads(ranks, model_folder, name, layout) -> None:
    wanted = expected(name, V2, 4)
    assert (wanted != expected(name, V2, 1)).any(), "vacuous: the order of the sums never shows"
    results = run(ranks, model_folder, name, layout, segments=4)
    for rank, result in enumerate(results):
        assert np.array_equal(bits(result["scores"]), wanted), f"rank {rank}"


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 1, 2)])
def test_v1_tiles_are_runs_then_a_tree(ranks, model_folder, layout) -> None:
    wanted = expected("tiny", V1, 8)
    shape = SHAPES["tiny"]
    o_proj = row_reduction(V1, shape.attention_width)
    down = row_reduction(V1, shape.intermediate_size)
    assert down.num_leaves == 12
    # The plain tree over 12 tiles, as a trainer that re-derives the order would add them.
    plain = replace(down, association=(balanced(0, 8), balanced(8, 4)))
    other = oracle.scores("tiny", weights("tiny"), batch_for("tiny"), V1, o_proj, plain)
    assert (wanted != bits(other)).any(), "vacuous: a plain tree gives the same bits"
    results = run(ranks, model_folder, "tiny", layout, contract=V1, segments=8)
    for result in results:
        assert np.array_equal(bits(result["scores"]), wanted)
        assert result["readback"]["op_calls"]["log_softmax:gather"] if layout[1] == 1 else True
    assert_path_ran(results, "tiny", layout, "tiles")


@pytest.mark.parametrize(("rollout_tp", "layout"), [(2, (1, 1, 1)), (2, (2, 1, 1)), (4, (2, 1, 1))])
def test_v1_rollout_partition_follows_the_rollout(ranks, model_folder, rollout_tp, layout) -> None:
    wanted = expected("odd_k", V1, 8, rollout_tp)
    assert (wanted != expected("odd_k", V1, 8, 1)).any(), "vacuous: the partition never shows"
    options = {"contract": V1, "segments": 8, "rollout_tensor_parallel_size": rollout_tp}
    results = run(ranks, model_folder, "odd_k", layout, **options)
    for result in results:
        assert np.array_equal(bits(result["scores"]), wanted)
        paths = result["readback"]["paths"]
        assert paths == {"o_proj": "rollout-partition", "down_proj": "rollout-partition"}
    assert_path_ran(results, "odd_k", layout, "rollout-partition")


@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        ("1:down_proj", (1, 1, 1)),
        ("0:o_proj:1", (2, 1, 1)),
        ("0:rope", (2, 1, 1)),
        ("final:logprob", (1, 2, 1)),
    ],
)
def test_a_fault_of_one_ulp_is_seen(ranks, model_folder, fault, layout) -> None:
    wanted = expected("small", V2, 4)
    results = run(ranks, model_folder, "small", layout, fault=fault)
    different = bits(results[0]["scores"]) != wanted
    assert different.any()
    assert results[0]["readback"]["fault"] is not None
    # And without it the same ranks agree again: the fault is not left behind.
    clean = run(ranks, model_folder, "small", layout)
    assert np.array_equal(bits(clean[0]["scores"]), wanted)


def test_the_control_without_a_contract_is_close_and_not_equal(ranks, model_folder) -> None:
    wanted = expected("tiny", V2, 4)
    for layout in ((1, 1, 1), (2, 2, 1)):
        result = run(ranks, model_folder, "tiny", layout, contract="off", want=("train",))[0]
        found = bits(result["scores"])
        assert (found != wanted).any()
        assert np.abs(found.view(np.float32) - wanted.view(np.float32)).max() < 0.2
        assert result["readback"]["fingerprint"] is None
        assert np.isfinite(result["train"]["grad_norm"])


def test_scores_do_not_depend_on_the_micro_batch(ranks, model_folder) -> None:
    wanted = expected("small", V2, 4)
    for size in (1, 2, 6):
        result = run(ranks, model_folder, "small", (1, 1, 1), micro_batch_size=size)[0]
        assert np.array_equal(bits(result["scores"]), wanted), size
    longest = max(map(len, batch_for("small").tokens))
    for tokens in (1, longest + 1):
        options = {"micro_batch_size": 64, "micro_batch_tokens": tokens}
        result = run(ranks, model_folder, "small", (1, 1, 1), **options)[0]
        assert np.array_equal(bits(result["scores"]), wanted), tokens
