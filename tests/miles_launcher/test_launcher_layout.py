"""Every impossible layout is refused with all its reasons; every possible one passes."""

from __future__ import annotations

import dataclasses

import pytest

from miles_launcher.layout import Layout, LayoutError, validate
from miles_launcher.policy import resolve_segments
from miles_launcher.profiles import get_profile

V1, V2 = "qwen3_dense_true_on_policy_v1", "qwen3_dense_true_on_policy_v2"


def violations(
    model: str,
    layout: tuple[int, int, int, int],
    contract: str = V2,
    segments: int | None = None,
    num_gpus: int | None = None,
    colocate: bool = True,
) -> tuple[str, ...]:
    """Reasons against (rollout_tp, train_tp, pp, cp); empty where there are none."""
    where = Layout(rollout_tp=layout[0], train_tp=layout[1], pp=layout[2], cp=layout[3])
    count = resolve_segments(contract, where, segments)
    try:
        validate(where, get_profile(model), contract, count, num_gpus=num_gpus, colocate=colocate)
    except LayoutError as error:
        return error.violations
    return ()


@pytest.mark.parametrize(
    "layout",
    [
        (1, 1, 1, 1),
        (2, 2, 1, 1),
        (1, 2, 1, 1),
        (2, 1, 1, 1),
        (4, 2, 1, 1),
        (1, 1, 2, 1),
        (1, 1, 1, 2),
        (2, 2, 2, 1),
        (8, 8, 4, 1),
        (1, 4, 1, 2),
    ],
)
def test_possible_on_tiny(layout: tuple[int, int, int, int]) -> None:
    assert violations("qwen3-tiny", layout) == ()


def test_all_violations_at_once() -> None:
    found = violations("qwen3-tiny", (3, 16, 3, 5), segments=6, num_gpus=8)
    text = "\n".join(found)
    for part in (
        "--rollout-tp=3 is not a power of two",
        "--train-tp=16 is not a power of two up to 8",
        "num_attention_heads=8 is not divisible by --rollout-tp=3",
        "num_attention_heads=8 is not divisible by --train-tp x --cp=80",
        "num_key_value_heads=4 can be neither divided over nor replicated to --rollout-tp=3",
        "o_proj: K=512 is not divisible by --rollout-tp=3",
        "--segments=6 must be a power of two; choose from 1, 2, 4, 8",
        "tensor_parallel_size=16 does not divide the 8 vocabulary segments",
        "num_hidden_layers=4 is not divisible by --pp=3; choose --pp from 1, 2, 4",
        "needs 240 GPUs (the larger of rollout_tp=3 and train_tp x pp x cp = 16 x 3 x 5 = 240), "
        "8 available",
    ):
        assert part in text, part
    assert len(set(found)) == len(found)


def test_degrees_below_one_are_refused_alone() -> None:
    assert violations("qwen3-tiny", (0, 1, -1, 1)) == (
        "--rollout-tp=0 must be 1 or more",
        "--pp=-1 must be 1 or more",
    )


def test_segments_too_few_for_a_degree() -> None:
    (o_proj, down_proj) = violations("qwen3-tiny", (1, 4, 1, 1), segments=2)
    assert o_proj.startswith("o_proj at --train-tp=4: K=512 has 2 leaves")
    assert "choose --segments from 4, 8" in o_proj
    assert down_proj.startswith("down_proj at --train-tp=4: K=1536")


def test_segments_that_do_not_divide_k() -> None:
    odd = dataclasses.replace(get_profile("qwen3-tiny"), intermediate_size=1536 + 4)
    with pytest.raises(LayoutError) as caught:
        validate(Layout(rollout_tp=2, train_tp=2), odd, V2, 8)
    text = str(caught.value)
    assert "down_proj at --rollout-tp=2: K=1540 is not divisible by segments=8" in text
    assert "choose --segments from 2, 4" in text
    assert "o_proj" not in text


def test_v1_follows_the_rollouts_partition() -> None:
    """4864 = 38 tiles a rank at TP=2; at TP=8 a rank's K is no multiple of the tile."""
    assert violations("qwen3-4b", (2, 2, 1, 1), V1) == ()
    assert violations("qwen3-4b", (8, 1, 1, 1), V1) == ()
    assert violations("qwen3-4b", (8, 8, 1, 1), V1) == ()
    (found,) = violations("qwen3-4b", (1, 8, 1, 1), V1)
    assert "down_proj at --train-tp=8: K=9728: the 76 leaves do not fall into 8 equal" in found
    assert "with --rollout-tp=1 choose --train-tp from 1, 2, 4" in found


def test_v1_has_no_segments() -> None:
    with pytest.raises(ValueError, match="--segments 4: .*has no segments"):
        violations("qwen3-tiny", (1, 1, 1, 1), V1, segments=4)


def test_key_value_heads_are_divided_or_replicated() -> None:
    assert violations("qwen3-tiny", (8, 1, 1, 1)) == ()  # 4 KV heads, each on two ranks
    six = dataclasses.replace(
        get_profile("qwen3-tiny"), num_attention_heads=24, num_key_value_heads=6, head_dim=64
    )
    with pytest.raises(LayoutError, match="num_key_value_heads=6 can be neither"):
        validate(Layout(rollout_tp=4), six, V2, 4)


def test_context_parallel_cuts_heads_too() -> None:
    (found,) = violations("qwen3-tiny", (1, 4, 1, 4))[:1]
    assert "num_attention_heads=8 is not divisible by --train-tp x --cp=16" in found


def test_several_engines_need_their_own_gpus() -> None:
    layout, segments = Layout(rollout_tp=2, train_tp=1), 2
    assert layout.gpus(True, 2) == 4 and layout.gpus(False, 2) == 5
    with pytest.raises(LayoutError, match="needs 4 GPUs .* rollout_tp=2 x 2 engines and train_tp"):
        validate(layout, get_profile("qwen3-4b"), V2, segments, num_gpus=3, num_engines=2)
    validate(layout, get_profile("qwen3-4b"), V2, segments, num_gpus=4, num_engines=2)


@pytest.mark.parametrize(
    ("colocate", "num_gpus", "needed"), [(True, 3, 4), (False, 7, 8), (True, 0, 4)]
)
def test_gpus_are_an_exact_product(colocate: bool, num_gpus: int, needed: int) -> None:
    (found,) = violations("qwen3-8b", (4, 2, 2, 1), num_gpus=num_gpus, colocate=colocate)
    assert f"needs {needed} GPUs" in found and f"{num_gpus} available" in found
    assert violations("qwen3-8b", (4, 2, 2, 1), num_gpus=needed, colocate=colocate) == ()


def test_default_segments_are_the_larger_degree() -> None:
    assert resolve_segments(V2, Layout(rollout_tp=4, train_tp=2), None) == 4
    assert resolve_segments(V2, Layout(rollout_tp=1, train_tp=2), None) == 2
    assert resolve_segments(V2, Layout(), 8) == 8
    assert resolve_segments("off", Layout(rollout_tp=2), None) == 2
