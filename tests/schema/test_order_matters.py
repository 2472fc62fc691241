"""Real numbers for which the association shows: without these, equal orders would prove nothing.

Rounding is done in pure Python. Every sum of two bf16 or fp32 numbers of like size is exact in a
Python float, or rounded there with enough bits to spare, so that one rounding remains.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

import pytest
from orders import V1, V2, plain_tree

from schema import association
from schema.reduction import Association, balanced

Rounding = Callable[[float], float]


def fp32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bf16(x: float) -> float:
    """Nearest bf16, ties to even, of a number that fp32 holds."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    bits += 0x7FFF + ((bits >> 16) & 1)
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0]


def add(order: Association, values: Sequence[float], rounding: Rounding) -> float:
    if isinstance(order, int):
        return values[order]
    return rounding(add(order[0], values, rounding) + add(order[1], values, rounding))


def left_to_right(count: int) -> Association:
    order: Association = 0
    for leaf in range(1, count):
        order = (order, leaf)
    return order


def different_sums(first: Association, second: Association, count: int, rounding: Rounding) -> int:
    """How many of 400 seeded vectors have two different sums."""
    source = random.Random(20)
    vectors = ([rounding(source.gauss(0.0, 1.0)) for _ in range(count)] for _ in range(400))
    return sum(add(first, v, rounding) != add(second, v, rounding) for v in vectors)


def test_rounding_is_to_the_nearest_even() -> None:
    assert bf16(1.0 + 2**-8) == 1.0
    assert bf16(1.0 + 3 * 2**-8) == 1.0 + 2**-6
    assert bf16(-(1.0 + 2**-7 + 2**-20)) == -(1.0 + 2**-7)
    assert fp32(1.0 + 2**-24) == 1.0


def test_one_sum_by_hand() -> None:
    """bf16 has eight significant bits: 256 + 1 is 256, but 256 + (1 + 1) is 258."""
    values = [1.0, 1.0, 256.0]
    assert add(((0, 1), 2), values, bf16) == 258.0
    assert add(((2, 0), 1), values, bf16) == 256.0


@pytest.mark.parametrize("tiles", [6, 12, 38, 76])
def test_v1_a_plain_tree_gives_other_numbers(tiles: int) -> None:
    order = association(V1, tiles * 128)
    assert different_sums(order, plain_tree(list(range(tiles))), tiles, bf16) > 40


@pytest.mark.parametrize("tiles", [4, 38, 64])
def test_v1_adding_left_to_right_gives_other_numbers(tiles: int) -> None:
    order = association(V1, tiles * 128)
    assert different_sums(order, left_to_right(tiles), tiles, bf16) > 40


def test_v1_is_the_plain_tree_where_runs_are_two() -> None:
    """The inverse: where the orders agree, so does every sum. A test with T=2 sees nothing."""
    for tiles in (2, 3, 4, 8, 64):
        order = association(V1, tiles * 128)
        assert order == plain_tree(list(range(tiles)))
        assert different_sums(order, plain_tree(list(range(tiles))), tiles, bf16) == 0


@pytest.mark.parametrize("segments", [4, 8])
def test_v2_adding_left_to_right_gives_other_numbers(segments: int) -> None:
    order = association(V2, 9728, segments=segments)
    assert different_sums(order, left_to_right(segments), segments, fp32) > 40


def test_rank_order_shows_from_four_ranks_on() -> None:
    """Two ranks cannot show a wrong rank order, since a + b = b + a; four can."""
    assert different_sums((0, 1), (1, 0), 2, fp32) == 0
    assert different_sums(balanced(0, 4), ((0, 2), (1, 3)), 4, fp32) > 40
