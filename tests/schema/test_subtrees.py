"""A rank's share of a sum: whole subtrees, and the two integers a kernel is compiled for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import SIZES, TILE, V1, V2

from schema import association, local_association, rank_association, row_reduction, run_of, run_tree
from schema.reduction import Association


def over_ranks(local: Association, per_rank: int, ranks: Association) -> Association:
    """The rank tree with every rank replaced by its subtree, leaves numbered globally."""

    def shifted(node: Association, by: int) -> Association:
        if isinstance(node, int):
            return node + by
        return shifted(node[0], by), shifted(node[1], by)

    if isinstance(ranks, int):
        return shifted(local, ranks * per_rank)
    return over_ranks(local, per_rank, ranks[0]), over_ranks(local, per_rank, ranks[1])


@given(tiles=st.integers(1, 300), tp=st.sampled_from(SIZES))
def test_v1_rank_subtrees_and_rank_tree_are_the_global_order(tiles: int, tp: int) -> None:
    reduction = row_reduction(V1, tiles * tp * TILE)
    local = local_association(reduction, tp)
    assert over_ranks(local, tiles, rank_association(tp)) == reduction.association
    # A rank that only knows its own K derives the same subtree: the shards are self-similar.
    assert local == association(V1, tiles * TILE)


@pytest.mark.parametrize("segments", SIZES)
@pytest.mark.parametrize("tp", SIZES)
def test_v2_rank_subtrees_and_rank_tree_are_the_global_order(segments: int, tp: int) -> None:
    reduction = row_reduction(V2, 9728, segments=segments)
    if tp > segments:
        with pytest.raises(ValueError, match=f"tensor_parallel_size={tp} would cut a leaf"):
            local_association(reduction, tp)
        return
    local = local_association(reduction, tp)
    assert over_ranks(local, segments // tp, rank_association(tp)) == reduction.association


@given(run=st.integers(1, 60), doublings=st.integers(0, 5))
def test_run_of_is_the_inverse_of_run_tree(run: int, doublings: int) -> None:
    leaves = run << doublings
    order = run_tree(leaves, run)
    found = run_of(order)
    assert run_tree(leaves, found) == order
    # Runs of one and of two are the same tree; otherwise the run is unique.
    assert found == (min(2, leaves) if run == 1 else run)


@pytest.mark.parametrize(("leaves", "run"), [(6, 2), (12, 4), (5, 2), (4, 8), (4, -2)])
def test_run_tree_needs_a_power_of_two_of_runs(leaves: int, run: int) -> None:
    with pytest.raises(ValueError, match=f"{leaves} leaves .* runs of {run}"):
        run_tree(leaves, run)


@pytest.mark.parametrize("order", [(0, (1, 2)), ((0, (1, 2)), 3), (1, 0), (((0, 1), (2, 3)), 4)])
def test_run_of_refuses_any_other_order(order: Association) -> None:
    with pytest.raises(ValueError, match="not runs followed by a balanced tree"):
        run_of(order)
