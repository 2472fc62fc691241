"""One-ulp faults: exactly one element of a row, exactly one ulp, exactly one place.

A comparison that stays green under such a fault compares nothing; so the fault itself is tested.
"""

from __future__ import annotations

import pytest
import torch

from sglang_patch.ops.fault import FINAL_OPS, LAYER_OPS, Fault, flip_one_ulp, parse_fault

INTEGER = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(INTEGER[tensor.dtype])


def changed(before: torch.Tensor, after: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(place) for place in (bits(before) != bits(after)).nonzero().tolist()]


def check_flips(before: torch.Tensor, after: torch.Tensor, rows: list[int]) -> None:
    """In each of `rows` the largest element moved by one ulp, and nothing else did."""
    assert (after.shape, after.dtype) == (before.shape, before.dtype)
    places = changed(before, after)
    assert [place[0] for place in places] == rows
    for place in places:
        assert abs(int(bits(after)[place]) - int(bits(before)[place])) == 1
        assert before[place].abs() == before[place[0]].abs().max()


@pytest.mark.parametrize("dtype", INTEGER)
@pytest.mark.parametrize("shape", [(5, 12), (1, 1), (4, 2, 6), (3,)])
def test_one_element_by_one_ulp_and_the_input_is_left_alone(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    before = values(*shape, dtype=dtype)
    kept = before.clone()
    last = shape[0] - 1
    fault = Fault(1, "o_proj", token=last)
    after = flip_one_ulp(fault, before, layer=1, op="o_proj", rank=0)
    assert torch.equal(bits(before), bits(kept))
    check_flips(before, after, [last])


@pytest.mark.parametrize("shape", [(5, 12), (1, 1), (4, 2, 6), (3,)])
def test_without_a_token_every_row_has_one(shape: tuple[int, ...]) -> None:
    before = values(*shape)
    after = flip_one_ulp(Fault(1, "o_proj"), before, layer=1, op="o_proj", rank=0)
    check_flips(before, after, list(range(shape[0])))


def test_a_transposed_input_is_flipped_in_its_own_places() -> None:
    before = values(6, 4).t()
    after = flip_one_ulp(Fault(0, "rope", token=2), before, layer=0, op="rope", rank=0)
    check_flips(before, after, [2])


@pytest.mark.parametrize("token", [0, 3])
def test_the_token_can_be_chosen(token: int) -> None:
    before = values(4, 8)
    after = flip_one_ulp(Fault(1, "q_norm", token=token), before, layer=1, op="q_norm", rank=0)
    check_flips(before, after, [token])


@pytest.mark.parametrize(
    ("fault", "layer", "op", "rank"),
    [
        (Fault(1, "o_proj"), 2, "o_proj", 0),
        (Fault(1, "o_proj"), None, "o_proj", 0),
        (Fault(1, "o_proj"), 1, "down_proj", 0),
        (Fault(1, "o_proj", rank=1), 1, "o_proj", 0),
        (Fault(1, "o_proj", token=4), 1, "o_proj", 0),
        (Fault(None, "final_norm"), 1, "o_proj", 0),
        (Fault(None, "final_norm"), None, "lm_head", 0),
    ],
)
def test_every_other_place_gets_the_very_same_tensor(
    fault: Fault, layer: int | None, op: str, rank: int
) -> None:
    before = values(4, 8)
    assert flip_one_ulp(fault, before, layer=layer, op=op, rank=rank) is before


def test_a_rank_that_holds_no_tokens_is_left_alone() -> None:
    empty = values(0, 8)
    assert flip_one_ulp(Fault(1, "o_proj"), empty, layer=1, op="o_proj", rank=0) is empty


@pytest.mark.parametrize("op", FINAL_OPS)
def test_final_ops_do_not_look_at_the_layer_the_pass_was_last_in(op: str) -> None:
    before = values(2, 8, dtype=torch.float32)
    after = flip_one_ulp(Fault(None, op), before, layer=3, op=op, rank=0)
    check_flips(before, after, [0, 1])


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_without_a_rank_every_rank_flips(rank: int) -> None:
    before = values(2, 8)
    after = flip_one_ulp(Fault(0, "down_proj"), before, layer=0, op="down_proj", rank=rank)
    check_flips(before, after, [0, 1])


def test_flipping_twice_restores_the_bits() -> None:
    before = values(3, 8)
    fault = Fault(0, "silu_mul")
    once = flip_one_ulp(fault, before, layer=0, op="silu_mul", rank=0)
    twice = flip_one_ulp(fault, once, layer=0, op="silu_mul", rank=0)
    assert torch.equal(bits(twice), bits(before))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0:down_proj", Fault(0, "down_proj")),
        ("35:o_proj:1", Fault(35, "o_proj", rank=1)),
        ("2:attention:0:7", Fault(2, "attention", rank=0, token=7)),
        ("final:lm_head", Fault(None, "lm_head")),
        ("final:logprob:3:0", Fault(None, "logprob", rank=3, token=0)),
    ],
)
def test_parse_fault(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    "op", [f"0:{op}" for op in LAYER_OPS] + [f"final:{op}" for op in FINAL_OPS]
)
def test_every_listed_op_can_be_asked_for(op: str) -> None:
    assert parse_fault(op).op == op.partition(":")[2]


@pytest.mark.parametrize("text", ["0:up_proj", "0:lm_head", "final:down_proj", "x:rope", "-1:rope"])
def test_an_unknown_place_lists_all_ops(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read fault") as caught:
        parse_fault(text)
    message = str(caught.value)
    assert repr(text) in message
    assert ", ".join(LAYER_OPS) in message
    assert ", ".join(FINAL_OPS) in message


@pytest.mark.parametrize("text", ["", "down_proj", "0:rope:0:0:0"])
def test_a_wrong_form_shows_the_right_one(text: str) -> None:
    with pytest.raises(ValueError, match=r"write LAYER:OP\[:RANK\[:TOKEN\]\]"):
        parse_fault(text)


@pytest.mark.parametrize("text", ["0:rope:a", "0:rope:-1", "0:rope:0:last", "0:rope:"])
def test_rank_and_token_are_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        parse_fault(text)
