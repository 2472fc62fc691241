"""The reduction order, against literal orders and an independent simulator of the published rule.

NUMERICS.md, section 1. Nothing here compares a function with what it is derived from: the
expected order is either written out, or produced by `published_order`, which runs the published
kernel's loop over strings and shares no code with the schema.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import SIZES, TILE, V1, V2, names, plain_tree, published_order, text

from schema import (
    association,
    local_association,
    row_reduction,
    run_of,
    supported_tensor_parallel_sizes,
)
from schema.reduction import run_length

# Tiles -> length of the runs that are added left to right (the published table, and more tiles
# that have gone wrong elsewhere: odd, prime, and an odd number times a power of two).
FIRST = {
    1: 1,
    2: 2,
    3: 3,
    4: 2,
    6: 3,
    7: 7,
    8: 2,
    12: 3,
    16: 2,
    19: 19,
    24: 3,
    32: 2,
    37: 37,
    38: 19,
    40: 5,
    48: 3,
    64: 2,
    76: 19,
    100: 25,
    148: 37,
}
# The largest tensor-parallel size that leaves every rank whole tiles.
LARGEST_TP = {t: max(tp for tp in SIZES if t % tp == 0) for t in FIRST}


@pytest.mark.parametrize(("tiles", "first"), FIRST.items())
def test_run_length_is_the_published_table(tiles: int, first: int) -> None:
    assert run_length(tiles) == first
    assert run_of(association(V1, tiles * TILE)) == first


def test_v1_k768_written_out() -> None:
    assert association(V1, 768) == (((0, 1), 2), ((3, 4), 5))
    assert association(V1, 768, tp=2, segments=4) == (((0, 1), 2), ((3, 4), 5))


def test_v1_small_orders_written_out() -> None:
    assert association(V1, 128) == 0
    assert association(V1, 256) == (0, 1)
    assert association(V1, 384) == ((0, 1), 2)
    assert association(V1, 512) == ((0, 1), (2, 3))
    assert association(V1, 896) == ((((((0, 1), 2), 3), 4), 5), 6)
    assert association(V1, 1024) == (((0, 1), (2, 3)), ((4, 5), (6, 7)))


def test_v1_qwen3_4b_down_proj_at_tp2_is_two_runs_of_nineteen() -> None:
    """K=4864 a rank: the case in which a plain tree left 234,686 of 327,680 elements different."""
    order = association(V1, 4864)
    assert not isinstance(order, int)
    left, right = (text(half) for half in order)
    assert left.startswith("((((((((((((((((((t0+t1)+t2)+t3)+t4)")
    assert left.endswith("+t17)+t18)")
    assert right.startswith("((((((((((((((((((t19+t20)+t21)")
    assert right.endswith("+t36)+t37)")
    assert left.count("(") == right.count("(") == 18


@pytest.mark.parametrize("tiles", FIRST)
def test_v1_is_what_the_published_loop_adds(tiles: int) -> None:
    assert text(association(V1, tiles * TILE)) == published_order(names(tiles))


@given(tiles=st.integers(1, 400))
def test_v1_is_what_the_published_loop_adds_for_any_k(tiles: int) -> None:
    assert text(association(V1, tiles * TILE)) == published_order(names(tiles))


@pytest.mark.parametrize("tiles", FIRST)
def test_v1_is_the_same_at_every_supported_tensor_parallel_size(tiles: int) -> None:
    k = tiles * TILE
    expected = tuple(tp for tp in SIZES if tp <= LARGEST_TP[tiles])
    assert supported_tensor_parallel_sizes(V1, k) == expected
    orders = {association(V1, k, tp) for tp in expected}
    assert orders == {association(V1, k)}
    for tp in set(SIZES) - set(expected):
        with pytest.raises(ValueError, match=rf"{k}.*tensor_parallel_size={tp}"):
            association(V1, k, tp)


def test_v1_refusal_names_k_the_degree_the_share_and_the_tile() -> None:
    with pytest.raises(ValueError, match="K=4864 at tensor_parallel_size=4.*1216.*128"):
        association(V1, 4864, 4)


@pytest.mark.parametrize("contract", [V1, V2])
@pytest.mark.parametrize("tp", [-1, 0, 3, 5, 6, 16])
def test_degree_that_is_not_a_power_of_two_is_refused(contract: str, tp: int) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel_size={tp} is not a power of two"):
        association(contract, 9728 * 3, tp)


def test_unknown_contract_lists_the_choices() -> None:
    with pytest.raises(ValueError, match=f"{V1}, {V2}"):
        association("qwen3_dense", 768)


def test_plain_tree_agrees_only_where_runs_are_two_or_there_are_three_tiles() -> None:
    agree = {
        t for t in range(1, 200) if published_order(names(t)) == text(plain_tree(list(range(t))))
    }
    assert agree == {t for t in range(1, 200) if run_length(t) <= 2 or t == 3}
    assert agree == {1, 2, 3, 4, 8, 16, 32, 64, 128}


@pytest.mark.parametrize("tiles", [6, 38])
def test_schema_is_not_the_plain_tree(tiles: int) -> None:
    assert association(V1, tiles * TILE) != plain_tree(list(range(tiles)))


def test_v2_written_out() -> None:
    assert association(V2, 9728, segments=1) == 0
    assert association(V2, 9728, segments=2) == (0, 1)
    assert association(V2, 9728, segments=4) == ((0, 1), (2, 3))
    assert association(V2, 9728, segments=8) == (((0, 1), (2, 3)), ((4, 5), (6, 7)))
    assert association(V2, 9728) == association(V2, 9728, segments=8)


@pytest.mark.parametrize("segments", SIZES)
def test_v2_is_the_same_at_every_supported_tensor_parallel_size(segments: int) -> None:
    expected = tuple(tp for tp in SIZES if tp <= segments)
    assert supported_tensor_parallel_sizes(V2, 9728, segments) == expected
    assert len({association(V2, 9728, tp, segments) for tp in expected}) == 1
    for tp in set(SIZES) - set(expected):
        with pytest.raises(ValueError, match=f"={tp} needs .* segments={segments}"):
            association(V2, 9728, tp, segments)


@pytest.mark.parametrize("segments", [-8, 0, 3, 6, 16])
def test_v2_segments_must_be_a_power_of_two_up_to_eight(segments: int) -> None:
    with pytest.raises(ValueError, match=f"segments={segments} is not a power of two from 1 to 8"):
        association(V2, 9728, segments=segments)


def test_v2_k_that_segments_do_not_divide_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="K=1540 is not divisible by segments=8"):
        association(V2, 1540)


@pytest.mark.parametrize("contract", [V1, V2])
@pytest.mark.parametrize("k", [0, -128, 129])
def test_k_must_be_positive_and_shared_evenly(contract: str, k: int) -> None:
    with pytest.raises(ValueError, match=f"K={k} is not divisible"):
        association(contract, k, 2, 2)


@pytest.mark.parametrize(("k_local", "tp"), [(1216, 4), (448, 2), (2368, 4), (192, 8), (64, 1)])
def test_rollout_partition_is_a_defined_path(k_local: int, tp: int) -> None:
    """Not a multiple of the tile: one plain product a rollout rank, then the tree over ranks."""
    reduction = row_reduction(V1, k_local * tp, rollout_tp=tp)
    assert reduction.path == "rollout-partition"
    assert reduction.leaves == tuple((i * k_local, (i + 1) * k_local) for i in range(tp))
    assert reduction.association == plain_tree(list(range(tp)))
    assert reduction.bias_ranks == tp
    assert reduction.bias_depth() == int(math.log2(tp))


def test_rollout_partition_is_mirrored_by_a_trainer_of_a_smaller_degree_only() -> None:
    reduction = row_reduction(V1, 4864, rollout_tp=4)
    assert local_association(reduction, 1) == ((0, 1), (2, 3))
    assert local_association(reduction, 2) == (0, 1)
    assert local_association(reduction, 4) == 0
    assert [reduction.leaves_per_rank(tp) for tp in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(ValueError, match="K=4864.*tensor_parallel_size=8 would cut a leaf"):
        local_association(reduction, 8)


def test_three_rollout_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=3 is not a power of two"):
        row_reduction(V1, 3 * 1216, rollout_tp=3)


@pytest.mark.parametrize(
    ("contract", "k", "tp", "path", "dtype", "bias_ranks"),
    [
        (V1, 1536, 2, "tiles", "bfloat16", 2),
        (V1, 1216, 2, "rollout-partition", "bfloat16", 2),
        (V2, 1536, 2, "segments", "float32", 1),
    ],
)
def test_path_dtype_and_bias(
    contract: str, k: int, tp: int, path: str, dtype: str, bias_ranks: int
) -> None:
    reduction = row_reduction(contract, k, rollout_tp=tp)
    assert (reduction.path, reduction.leaf_dtype) == (path, dtype)
    assert reduction.bias_ranks == bias_ranks


@given(contract=st.sampled_from([V1, V2]), units=st.integers(1, 300), tp=st.sampled_from(SIZES))
def test_leaves_cut_the_whole_k_in_order(contract: str, units: int, tp: int) -> None:
    reduction = row_reduction(contract, 64 * units * tp, rollout_tp=tp)
    stops = [stop for _, stop in reduction.leaves]
    assert [start for start, _ in reduction.leaves] == [0, *stops[:-1]]
    assert stops[-1] == reduction.k_global == 64 * units * tp
    assert len({stop - start for start, stop in reduction.leaves}) == 1
    assert text(reduction.association).count("t") == reduction.num_leaves
