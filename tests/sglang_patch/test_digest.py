"""Digests of sharded weights: every sharding has the same sum, every other bit or place another.

They are what says, after a weight update, that both engines hold the same numbers in the same
places; each property is therefore shown beside the change that must break it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_patch.ops import digest
from sglang_patch.ops.digest import shard_digest, source_digest, table_digest, weights_digest

MASK = 2**64 - 1


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1009 + columns)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def whole(tensor: torch.Tensor) -> int:
    return shard_digest(tensor, (0, tensor.shape[0]), (0, tensor.shape[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_row_and_column_shards_add_to_the_whole(dtype: torch.dtype, ranks: int) -> None:
    tensor = matrix(24, 16, dtype)
    rows, columns = 24 // ranks, 16 // ranks
    by_rows = [
        shard_digest(part, (i * rows, (i + 1) * rows), (0, 16))
        for i, part in enumerate(tensor.chunk(ranks, dim=0))
    ]
    by_columns = [
        shard_digest(part, (0, 24), (i * columns, (i + 1) * columns))
        for i, part in enumerate(tensor.chunk(ranks, dim=1))
    ]
    assert sum(by_rows) & MASK == sum(by_columns) & MASK == whole(tensor)
    assert all(0 <= part <= MASK for part in by_rows + by_columns)


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    row_cut=st.integers(0, 9),
    column_cut=st.integers(0, 9),
)
def test_any_cut_into_four_blocks_adds_to_the_whole(
    rows: int, columns: int, row_cut: int, column_cut: int
) -> None:
    tensor = matrix(rows, columns)
    row_cut, column_cut = min(row_cut, rows), min(column_cut, columns)
    total = sum(
        shard_digest(tensor[r0:r1, c0:c1], (r0, r1), (c0, c1))
        for r0, r1 in ((0, row_cut), (row_cut, rows))
        for c0, c1 in ((0, column_cut), (column_cut, columns))
        if r1 > r0 and c1 > c0
    )
    assert total & MASK == whole(tensor)


def test_chunks_of_a_large_tensor_add_to_the_same_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = matrix(13, 7)
    expected = whole(tensor)
    for chunk in (1, 7, 8, 20):
        monkeypatch.setattr(digest, "_CHUNK", chunk)
        assert whole(tensor) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_flipped_bit_changes_it(dtype: torch.dtype) -> None:
    tensor = matrix(4, 3, dtype)
    integer = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[dtype]
    seen = {whole(tensor)}
    for row in range(4):
        for column in range(3):
            for bit in range(torch.iinfo(integer).bits - 1):
                other = tensor.clone()
                other.view(integer)[row, column] ^= 1 << bit
                seen.add(whole(other))
    assert len(seen) == 1 + 4 * 3 * (torch.iinfo(integer).bits - 1)


def test_the_sign_of_zero_and_the_payload_of_nan_count() -> None:
    zero = torch.zeros(1, 1, dtype=torch.float32)
    quiet = torch.tensor([[0x7FC00000]], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([[0x7FC00001]], dtype=torch.int32).view(torch.float32)
    assert len({whole(t) for t in (zero, -zero, quiet, other)}) == 4


def test_swapped_rows_columns_and_shards_change_it() -> None:
    tensor = matrix(4, 4)
    assert whole(tensor[[1, 0, 2, 3]]) != whole(tensor)
    assert whole(tensor[:, [1, 0, 2, 3]]) != whole(tensor)
    assert whole(tensor.t()) != whole(tensor)
    # The right shards on the wrong ranks: what a wrong rank order of a weight update looks like.
    upper, lower = tensor[:2], tensor[2:]
    swapped = shard_digest(lower, (0, 2), (0, 4)) + shard_digest(upper, (2, 4), (0, 4))
    assert swapped & MASK != whole(tensor)


def test_equal_rows_at_other_places_count() -> None:
    """A place enters every element's share, so repeated values cannot cancel out."""
    row = torch.ones(1, 4, dtype=torch.bfloat16)
    places = {shard_digest(row, (i, i + 1), (j, j + 4)) for i in range(50) for j in range(50)}
    assert len(places) == 2500


def test_a_vector_is_one_column() -> None:
    vector = matrix(6, 1).flatten()
    assert shard_digest(vector, (0, 6), (0, 1)) == whole(vector[:, None])
    halves = shard_digest(vector[:3], (0, 3), (0, 1)) + shard_digest(vector[3:], (3, 6), (0, 1))
    assert halves & MASK == whole(vector[:, None])


def test_strides_do_not_matter_only_values_and_places() -> None:
    tensor = matrix(6, 4)
    assert whole(tensor.t().contiguous().t()) == whole(tensor)


def test_parameters_with_a_gradient_are_read_as_they_are() -> None:
    parameter = torch.nn.Parameter(matrix(3, 3))
    assert whole(parameter) == whole(parameter.detach())


@pytest.mark.parametrize(
    ("rows", "columns"), [((0, 3), (0, 4)), ((0, 4), (0, 3)), ((1, 4), (1, 5))]
)
def test_ranges_that_do_not_fit_are_refused_with_the_numbers(
    rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match=r"shard \(4, 4\) is not \("):
        shard_digest(matrix(4, 4), rows, columns)


def test_weights_digest_is_over_names_and_sums() -> None:
    first = weights_digest({"a.weight": 1, "b.weight": 2})
    assert first == weights_digest({"b.weight": 2, "a.weight": 1})
    assert len(first) == 64
    others = [
        {"a.weight": 2, "b.weight": 1},
        {"a.weight": 1},
        {"a.weight": 1, "b.weight": 3},
        {"a.weight": 1, "c.weight": 2},
        {},
    ]
    assert len({first, *map(weights_digest, others)}) == 1 + len(others)


def test_weights_digest_reduces_sums_over_ranks_itself() -> None:
    assert weights_digest({"a": 2**64 + 5}) == weights_digest({"a": 5})
    tensor = matrix(4, 4)
    parts = shard_digest(tensor[:2], (0, 2), (0, 4)) + shard_digest(tensor[2:], (2, 4), (0, 4))
    assert weights_digest({"w": parts}) == weights_digest({"w": whole(tensor)})


def test_table_digest_sees_every_bit_and_no_stride() -> None:
    table = matrix(8, 4, torch.float32)
    assert table_digest(table) == table_digest(table.t().contiguous().t())
    other = table.clone()
    other.view(torch.int32)[7, 3] ^= 1
    assert table_digest(other) != table_digest(table)


def test_source_digest_reads_names_and_contents_of_python_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Python files below"):
        source_digest(tmp_path)
    (tmp_path / "op").mkdir()
    (tmp_path / "op" / "kernel.py").write_text("a = 1\n")
    first = source_digest(tmp_path)
    (tmp_path / "op" / "kernel.pyc").write_bytes(b"\0")
    assert source_digest(tmp_path) == first
    (tmp_path / "op" / "kernel.py").write_text("a = 2\n")
    changed = source_digest(tmp_path)
    (tmp_path / "op" / "kernel.py").rename(tmp_path / "op" / "other.py")
    assert len({first, changed, source_digest(tmp_path)}) == 3
