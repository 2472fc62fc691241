"""Which GPUs a trainer rank sees: all of its node's that the trainer has, itself among them."""

from __future__ import annotations

from miles_launcher.runtime.session import _on_node, _visible

# (node, GPU) of every bundle: two of node a for the engine, then the trainer's four on two nodes.
GPUS = [("a", "0"), ("a", "1"), ("a", "2"), ("a", "3"), ("b", "5"), ("b", "4")]
TRAINER = [2, 3, 4, 5]


def test_ranks_see_the_trainer_s_gpus_of_their_node_and_know_their_own() -> None:
    seen = {bundle: _on_node(GPUS, TRAINER, bundle) for bundle in TRAINER}
    assert seen == {2: [2, 3], 3: [2, 3], 4: [4, 5], 5: [4, 5]}
    for bundle in TRAINER:
        listed = _visible(GPUS, seen[bundle])["CUDA_VISIBLE_DEVICES"].split(",")
        assert listed[seen[bundle].index(bundle)] == GPUS[bundle][1]


def test_without_gpus_a_rank_is_alone() -> None:
    assert _on_node([], [0, 1], 1) == [1] and _visible([], [1]) == {}
