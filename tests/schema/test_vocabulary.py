"""The vocabulary's segments: one order of the log-softmax at every sharding, no padding inside."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schema import vocabulary_segments

V1 = "qwen3_dense_true_on_policy_v1"
V2 = "qwen3_dense_true_on_policy_v2"
SIZES = (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("vocab_size", "width", "real"),
    [
        # Qwen3: the last segment is short by the 128 columns that padding to 152064 adds.
        (151936, 19008, [19008] * 7 + [18880]),
        (500, 64, [64] * 7 + [52]),
        # A byte-level vocabulary: whole segments hold no real column.
        (259, 64, [64, 64, 64, 64, 3, 0, 0, 0]),
        (512, 64, [64] * 8),
        (513, 128, [128, 128, 128, 128, 1, 0, 0, 0]),
        (1, 64, [1, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_v2_segments_written_out(vocab_size: int, width: int, real: list[int]) -> None:
    segments = vocabulary_segments(V2, vocab_size)
    assert (segments.num_segments, segments.width) == (8, width)
    assert segments.padded_size == 8 * width
    assert [segments.real_columns(i) for i in range(8)] == real


@given(vocab_size=st.integers(1, 400_000))
def test_v2_real_columns_are_the_vocabulary_exactly_once(vocab_size: int) -> None:
    segments = vocabulary_segments(V2, vocab_size)
    real = [segments.real_columns(i) for i in range(segments.num_segments)]
    assert sum(real) == vocab_size
    assert real == sorted(real, reverse=True)
    assert segments.width % 64 == 0
    # The narrowest such width: one multiple less would not hold the vocabulary.
    assert (segments.width - 64) * 8 < vocab_size <= segments.padded_size


@pytest.mark.parametrize("vocab_size", [151936, 500, 259, 512])
@pytest.mark.parametrize("tp", SIZES)
def test_v2_shards_are_whole_segments_at_every_degree(vocab_size: int, tp: int) -> None:
    segments = vocabulary_segments(V2, vocab_size)
    shards = [segments.shard(tp, rank) for rank in range(tp)]
    assert shards[0][0] == 0
    assert shards[-1][1] == segments.padded_size
    assert all(stop == start for (_, stop), (start, _) in zip(shards, shards[1:], strict=False))
    assert {stop - start for start, stop in shards} == {segments.width * 8 // tp}
    assert all(start % segments.width == 0 for start, _ in shards)


def test_v2_a_shard_may_hold_no_real_column() -> None:
    segments = vocabulary_segments(V2, 259)
    assert segments.shard(8, 7) == (448, 512)
    assert segments.shard(2, 1) == (256, 512)


@pytest.mark.parametrize("tp", [3, 5, 6, 16])
def test_v2_degree_that_cuts_a_segment_is_refused_with_the_numbers(tp: int) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel_size={tp} does not divide the 8"):
        vocabulary_segments(V2, 151936).shard(tp, 0)


@pytest.mark.parametrize("vocab_size", [151936, 500, 259, 512])
def test_v1_gathers_first_so_the_vocabulary_is_one_segment(vocab_size: int) -> None:
    segments = vocabulary_segments(V1, vocab_size)
    assert (segments.num_segments, segments.width) == (1, vocab_size)
    assert segments.real_columns(0) == segments.padded_size == vocab_size
    with pytest.raises(ValueError, match="tensor_parallel_size=2 does not divide the 1"):
        segments.shard(2, 0)


@pytest.mark.parametrize("contract", [V1, V2])
@pytest.mark.parametrize("vocab_size", [0, -5])
def test_an_empty_vocabulary_is_refused(contract: str, vocab_size: int) -> None:
    with pytest.raises(ValueError, match=f"vocab_size={vocab_size} must be positive"):
        vocabulary_segments(contract, vocab_size)
