"""Packing, zigzag, Ulysses and the gathers: the exchanges alone, over real ranks."""

from __future__ import annotations

import pytest
import torch

from megatron_patch.parallel import pack
from megatron_patch.parallel.packing import zigzag_slots

CPU = torch.device("cpu")
LENGTHS = [5, 9, 1, 16, 3]


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 16, 17])
def test_zigzag_gives_every_position_a_slot_of_its_own(length: int, cp: int) -> None:
    per_rank, owners, slots = zigzag_slots(length, cp)
    places = set(zip(owners[:length], slots[:length], strict=True))
    assert len(places) == length
    assert all(0 <= o < cp and 0 <= s < per_rank for o, s in places)
    if cp > 1:
        assert per_rank * cp < length + 2 * cp
        chunk = per_rank // 2
        # Rank 0 holds the first chunk and the last.
        assert owners[0] == 0
        assert owners[2 * cp * chunk - 1] == 0


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_packing_scores_every_response_token_once(cp: int) -> None:
    sequences = [list(range(10 * i, 10 * i + n)) for i, n in enumerate(LENGTHS)]
    prompts = [2, 9, 1, 1, 2]
    parts = [
        pack(sequences, prompts, temperature=1.0, device=CPU, cp_size=cp, cp_rank=r)
        for r in range(cp)
    ]
    everything = torch.cat([p.tokens for p in parts])
    flat = torch.tensor([t for s in sequences for t in s])
    if cp > 1:
        assert torch.equal(everything[parts[0].natural], flat)
    else:
        assert torch.equal(everything, flat)
    wanted = [t for s, p in zip(sequences, prompts, strict=True) for t in s[p:]]
    found: dict[int, int] = {}
    for part in parts:
        for row, target, place in zip(
            part.scored[: part.num_scored], part.targets, part.places, strict=False
        ):
            assert int(place) not in found
            found[int(place)] = int(target)
            # The row holds the token before the target.
            assert int(part.tokens[row]) == int(target) - 1
    assert [found[i] for i in range(len(wanted))] == wanted
    assert all(p.total_scored == len(wanted) for p in parts)


@pytest.mark.parametrize(("sequences", "prompts"), [([[]], [1]), ([[1, 2]], [0]), ([[1, 2]], [3])])
def test_packing_refuses_what_cannot_be_scored(sequences, prompts) -> None:  # noqa: ANN001
    with pytest.raises(ValueError, match="sequence 0"):
        pack(sequences, prompts, temperature=1.0, device=CPU)


@pytest.mark.parametrize(("cp", "kv_heads"), [(2, 4), (2, 1), (4, 2), (4, 4)])
def test_ulysses_attention_is_attention(ranks, cp: int, kv_heads: int) -> None:
    """Odd packed lengths; fewer KV heads than ranks; forward bits and gradients."""
    results = ranks.run(cp, "ulysses_against_whole", LENGTHS, 4, kv_heads)
    for rank, result in enumerate(results):
        assert result["equal"], rank
        assert result["padding_is_zero"], rank
        # Every per-head product is the same; only copies of a KV head are rounded before a sum.
        assert result["query_gradient_equal"], rank
        assert result["key_gradient_error"] <= (0.0 if kv_heads >= cp else 2.0**-7), rank


def test_gathers_and_their_gradients(ranks) -> None:
    for world in (2, 4):
        for result in ranks.run(world, "gathers"):
            assert result["forward"]
            assert result["replicated_is_own_slice"]
            assert result["partial_is_the_sum"]
            assert result["order_shows"], "vacuous: the ranks' sum has one value in any order"


@pytest.mark.parametrize("world", [2, 4])
def test_reduce_scatter_drops_no_row_and_hands_back_the_owners_gradients(ranks, world: int) -> None:
    for result in ranks.run(world, "row_scatter"):
        assert result["order_shows"], "vacuous: the ranks' sum has one value in any order"
        assert all(result.values()), result
