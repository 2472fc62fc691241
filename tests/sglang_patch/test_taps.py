"""What a tap records: digests that do not see the sharding, and see every bit, place and row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sglang_patch import state
from sglang_patch.contracts import SGLangRuntimePolicy
from sglang_patch.hooks.taps import REQUEST_PREFIX, token_rows
from sglang_patch.ops.digest import row_digests
from sglang_patch.ops.fault import FINAL_OPS, LAYER_OPS
from sglang_patch.ops.taps import TapLog, TapShape, parse_kept, tap_columns, tap_name
from sglang_patch.schema import get_contract

SHAPE = TapShape(
    intermediate_size=48,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=50,
)
WIDTHS = {
    "qkv_proj": (8 + 2 + 2) * 4,
    "q_norm": 32,
    "k_norm": 8,
    "rope": 32,
    "rope_k": 8,
    "attention": 32,
    "gate_up_proj": 96,
    "silu_mul": 48,
    "lm_head": 64,
}


def rows(count: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(width)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("op", WIDTHS)
def test_the_shards_of_every_op_add_up(op: str, size: int, dtype: torch.dtype) -> None:
    """At four and eight ranks two key heads are shared: their copies must count once."""
    width = WIDTHS[op]
    whole = rows(5, width, dtype)
    one = row_digests(whole, tap_columns(op, SHAPE, 0, 1, width))
    total = torch.zeros(5, dtype=torch.int64)
    used = 0
    for rank in range(size):
        parts = {
            "qkv_proj": (whole[:, :32], whole[:, 32:40], whole[:, 40:]),
            "gate_up_proj": (whole[:, :48], whole[:, 48:]),
        }.get(op, (whole,))
        shard = torch.cat([_share(part, rank, size) for part in parts], dim=1)
        columns = tap_columns(op, SHAPE, rank, size, shard.shape[1])
        used += int((columns >= 0).sum())
        total += row_digests(shard, columns)
    assert torch.equal(total, one)
    assert used == min(width, SHAPE.vocab_size) if op == "lm_head" else used == width
    assert len(set(one.tolist())) == 5


def _share(part: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """This rank's columns; where there are fewer heads than ranks, consecutive ranks share one."""
    if part.shape[1] == 8 and size > 2:
        return part.chunk(2, dim=1)[rank // (size // 2)]
    return part.chunk(size, dim=1)[rank]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_flipped_bit_changes_its_row_and_no_other(dtype: torch.dtype) -> None:
    tensor = rows(4, 33, dtype)
    columns = torch.arange(33)
    before = row_digests(tensor, columns)
    integer = torch.int16 if dtype == torch.bfloat16 else torch.int32
    for row, column, bit in ((0, 0, 0), (2, 32, 15), (3, 17, 7)):
        changed = tensor.clone()
        changed.view(integer)[row, column] ^= 1 << bit if bit < 15 else -(1 << 15)
        after = row_digests(changed, columns)
        assert (after != before).nonzero().flatten().tolist() == [row]
    swapped = tensor[:, [1, 0, *range(2, 33)]]
    assert not (row_digests(swapped, columns) == before).any(), "columns have places"
    assert torch.equal(row_digests(swapped, columns[[1, 0, *range(2, 33)]]), before)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows \(2, 4\) and columns \(3,\)"):
        row_digests(rows(2, 4), torch.arange(3))
    with pytest.raises(ValueError, match="float64 is not a 16- or 32-bit format"):
        row_digests(rows(2, 4).double(), torch.arange(4))
    with pytest.raises(ValueError, match="tap silu_mul: rank 0 of 2 has rows of 48"):
        tap_columns("silu_mul", SHAPE, 0, 2, 48)
    log = TapLog(SHAPE)
    log.at(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="tap 1.o_proj: 4 rows where 3 tokens were announced"):
        log.record(1, "o_proj", rows(4, 16))
    with pytest.raises(ValueError, match="tap final.lm_head: 3 rows where 1"):
        log.record(None, "lm_head", rows(3, 64))


def test_rows_of_no_token_are_left_out_and_asked_rows_are_kept() -> None:
    log = TapLog(SHAPE, kept=parse_kept("1:o_proj:0,4;2,1"))
    log.at(torch.tensor([[0, 3], [-1, 0], [2, 1]]), torch.tensor([[2, 1]]))
    values = rows(3, 16)
    log.record(1, "o_proj", values)
    log.record(0, "o_proj", values)
    dump = log.dump()
    assert set(dump) == {"1.o_proj", "0.o_proj", "row.2.2.1"}
    assert dump["1.o_proj"][:, :2].tolist() == [[0, 3], [2, 1]]
    assert dump["row.2.2.1"][0].tolist() == list(range(16))
    assert dump["row.2.2.1"][1].tolist() == values[2].view(torch.int16).tolist()


def test_names_of_rows_in_prefill_and_decode() -> None:
    names = [f"{REQUEST_PREFIX}3-1", "warm-up", f"{REQUEST_PREFIX}0-1"]
    tokens, last = token_rows(names, [2, 1, 3], torch.tensor([4, 5, 0, 0, 1, 2]))
    assert tokens.tolist() == [[3, 4], [3, 5], [-1, 0], [0, 0], [0, 1], [0, 2]]
    assert last.tolist() == [[3, 5], [-1, 0], [0, 2]]
    tokens, last = token_rows(names, [1, 1, 1], torch.tensor([6, 1, 3]))
    assert tokens.tolist() == last.tolist() == [[3, 6], [-1, 1], [0, 3]]
    with pytest.raises(ValueError, match="the pass has 4; padded passes cannot be recorded"):
        token_rows(names, [1, 1, 1], torch.tensor([6, 1, 3, 0]))


@pytest.fixture
def live() -> Iterator[state.RuntimeState]:
    state.activate(None)
    contract = get_contract("qwen3_dense_true_on_policy_v2")
    state.activate(SGLangRuntimePolicy(contract=contract, segments=1, tensor_parallel_size=1))
    yield state.require()
    state.activate(None)


def test_a_tap_hands_on_the_same_tensor_on_and_off(live: state.RuntimeState) -> None:
    values = rows(2, 16)
    kept = values.clone()
    assert state.tap("o_proj", values, 1) is values
    live.taps = TapLog(SHAPE)
    live.taps.at(torch.tensor([[0, 0], [0, 1]]), torch.tensor([[0, 1]]))
    assert state.tap("o_proj", values, 1) is values
    assert state.tap("final_norm", values) is values
    assert torch.equal(values.view(torch.int16), kept.view(torch.int16))
    assert set(live.taps.dump()) == {"1.o_proj", "final.final_norm"}


def test_every_op_has_a_name_and_columns() -> None:
    names = {tap_name(3, op) for op in (*LAYER_OPS, *FINAL_OPS)}
    assert names == {f"3.{op}" for op in LAYER_OPS} | {f"final.{op}" for op in FINAL_OPS}
    for op in {*LAYER_OPS, *FINAL_OPS} - WIDTHS.keys():
        assert tap_columns(op, SHAPE, 1, 2, 16).tolist() == list(range(16))
