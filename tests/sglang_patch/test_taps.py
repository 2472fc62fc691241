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
from sglang_patch.ops.tap_layout import INPUTS, layout_of
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
    with pytest.raises(ValueError, match="layout silu_mul: rank 0 of 2 has rows of 48"):
        tap_columns("silu_mul", SHAPE, 0, 2, 48)
    log = TapLog(SHAPE)
    with pytest.raises(ValueError, match="3 rows before any pass was announced"):
        log.record(1, "o_proj", rows(3, 16))
    log.at(torch.zeros(3, 2, dtype=torch.int64), head=torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="4 rows from row 0 on, where 3 tokens .* for tokens"):
        log.record(1, "o_proj", rows(4, 16))
    with pytest.raises(ValueError, match="tap final.lm_head.output: 3 rows .* where 1 tokens"):
        log.record(None, "lm_head", rows(3, 64))


def test_rows_of_the_head_may_come_in_parts_and_of_no_more_than_were_announced() -> None:
    log = TapLog(SHAPE)
    head = torch.tensor([[0, 4], [0, 5], [1, 2]])
    log.at(torch.zeros(7, 2, dtype=torch.int64), head=head)
    values = rows(3, 64)
    log.record(None, "lm_head", values[:2])
    log.record(None, "lm_head", values[2:])
    tap = log.dump()["taps"]["final.lm_head.output"]
    assert tap["spans"].tolist() == [[1, 0, 0, 2], [1, 0, 2, 1]]
    whole = TapLog(SHAPE)
    whole.at(torch.zeros(7, 2, dtype=torch.int64), head=head)
    whole.record(None, "lm_head", values)
    assert torch.equal(whole.dump()["taps"]["final.lm_head.output"]["digests"], tap["digests"])
    with pytest.raises(ValueError, match="1 rows from row 3 on"):
        log.record(None, "lm_head", values[:1])


def test_memory_of_a_whole_model_of_4_096_tokens() -> None:
    """Eight bytes a row and tap: what a rank holds does not grow with the width of the rows."""
    log = TapLog(SHAPE)
    tokens = torch.stack((torch.zeros(512, dtype=torch.int64), torch.arange(512)), dim=1)
    values = {op: rows(512, WIDTHS.get(op, 16)) for op in LAYER_OPS}
    for _ in range(8):
        log.at(tokens)
        for layer in range(36):
            for op in LAYER_OPS:
                log.record(layer, op, values[op])
    dump = log.dump()
    stored = sum(t["digests"].nbytes + t["spans"].nbytes for t in dump["taps"].values())
    stored += sum(part.nbytes for parts in dump["passes"].values() for part in parts)
    assert len(dump["taps"]) == 36 * len(LAYER_OPS)
    assert stored < 36 * len(LAYER_OPS) * 4096 * 9


def test_rows_of_no_token_are_left_out_and_asked_rows_are_kept() -> None:
    kept = parse_kept('{"outputs": [[0, 4], [2, 1]], "taps": {"1.qkv_proj.input": [[0, 3]]}}')
    log = TapLog(SHAPE, kept=kept)
    log.at(torch.tensor([[0, 3], [-1, 0], [2, 1]]))
    values = rows(3, 16)
    log.record(1, "o_proj", values)
    log.record(1, "qkv_proj", values, "input")
    log.record(0, "qkv_proj", values, "input")
    dump = log.dump()
    assert set(dump["taps"]) == {"1.o_proj.output", "1.qkv_proj.input", "0.qkv_proj.input"}
    assert dump["passes"]["tokens"][0].tolist() == [[0, 3], [-1, 0], [2, 1]]
    assert set(dump["rows"]) == {"1.o_proj.output", "1.qkv_proj.input"}
    row = dump["rows"]["1.o_proj.output"]
    assert row["tokens"].tolist() == [[2, 1]]
    assert row["columns"].tolist() == list(range(16))
    assert row["bits"].tolist() == values[2:].view(torch.int16).tolist()
    assert dump["rows"]["1.qkv_proj.input"]["tokens"].tolist() == [[0, 3]]


def test_a_gathered_row_has_the_digest_of_its_shards() -> None:
    logits = rows(2, 64, torch.float32)
    names = torch.tensor([[0, 0], [0, 1]])
    shards = []
    for rank in range(2):
        log = TapLog(SHAPE, rank, 2)
        log.at(names, scored=names)
        log.record(None, "temperature", logits.chunk(2, dim=1)[rank])
        shards.append(log.dump()["taps"]["final.temperature.output"])
    log = TapLog(SHAPE, 1, 2)
    log.at(names, scored=names)
    log.record(None, "temperature", logits[:, :50], gathered=True)
    whole = log.dump()["taps"]["final.temperature.output"]
    assert whole["whole"] and not shards[0]["whole"]
    assert torch.equal(whole["digests"], shards[0]["digests"] + shards[1]["digests"])


def test_names_of_rows_in_prefill_and_decode() -> None:
    names = [f"{REQUEST_PREFIX}3-1", "warm-up", f"{REQUEST_PREFIX}0-1"]
    found = token_rows(names, [2, 1, 3], torch.tensor([4, 5, 0, 0, 1, 2]))
    assert found["tokens"].tolist() == [[3, 4], [3, 5], [-1, 0], [0, 0], [0, 1], [0, 2]]
    assert found["scored"].tolist() == found["head"].tolist() == [[3, 5], [-1, 0], [0, 2]]
    assert found["prompt"].tolist() == []
    found = token_rows(names, [1, 1, 1], torch.tensor([6, 1, 3]))
    assert found["tokens"].tolist() == found["scored"].tolist() == [[3, 6], [-1, 1], [0, 3]]
    found = token_rows(names, [2, 1, 3], torch.tensor([4, 5, 0, 0, 1, 2]), [2, 1, 1])
    assert found["head"].tolist() == [[3, 5], [-1, 0], [0, 1], [0, 2]]
    assert found["prompt"].tolist() == [[0, 1], [0, 2]]
    with pytest.raises(ValueError, match="the pass has 4; padded passes cannot be recorded"):
        token_rows(names, [1, 1, 1], torch.tensor([6, 1, 3, 0]))


@pytest.fixture
def live() -> Iterator[state.RuntimeState]:
    state.activate(None)
    contract = get_contract("qwen3_dense_true_on_policy_v2")
    state.activate(
        SGLangRuntimePolicy(
            contract=contract, segments=1, tensor_parallel_size=1, attention="reference"
        )
    )
    yield state.require()
    state.activate(None)


def test_a_tap_hands_on_the_same_tensor_on_and_off(live: state.RuntimeState) -> None:
    values = rows(2, 16)
    kept = values.clone()
    assert state.tap("o_proj", values, 1) is values
    live.taps = TapLog(SHAPE)
    live.taps.at(torch.tensor([[0, 0], [0, 1]]))
    assert state.tap("o_proj", values, 1) is values
    assert state.tap("final_norm", values) is values
    assert torch.equal(values.view(torch.int16), kept.view(torch.int16))
    assert set(live.taps.dump()["taps"]) == {"1.o_proj.output", "final.final_norm.output"}


def test_every_op_has_a_name_and_columns() -> None:
    names = {tap_name(3, op) for op in (*LAYER_OPS, *FINAL_OPS)}
    assert names == {f"3.{op}.output" for op in LAYER_OPS} | {
        f"final.{op}.output" for op in FINAL_OPS
    }
    for op in {*LAYER_OPS, *FINAL_OPS}:
        layout = layout_of(op)
        if layout not in WIDTHS:
            assert tap_columns(layout, SHAPE, 1, 2, 16).tolist() == list(range(16))
    assert set(INPUTS) | {"embedding", "logprob"} == {*LAYER_OPS, *FINAL_OPS}
    for op, tensors in INPUTS.items():
        assert all(layout_of(op, name) in {*WIDTHS, "hidden"} for name in tensors)
