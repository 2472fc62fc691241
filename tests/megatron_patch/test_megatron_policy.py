"""Contract binding, fingerprints, refused settings, the CPU shims and the trainer's own checks."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from megatron_models import SHAPES, V1, V2

from megatron_patch import cpu_platform, faults
from megatron_patch.config import PolicyTransformerConfig, RopeTable, common_settings
from megatron_patch.contracts import fingerprint, policy_for
from megatron_patch.model import merged
from miles_launcher.runtime.batch import Batch
from miles_launcher.runtime.grpo import clipped_policy_loss
from miles_launcher.runtime.trainer_config import TrainerRankConfig

CPU = torch.device("cpu")


def bound(name: str = "tiny", contract: str = V2, **changes: int):  # noqa: ANN201
    shape = SHAPES[name]
    numbers = {
        "segments": 4,
        "rollout_tensor_parallel_size": 2,
        "tensor_parallel_size": 1,
        "vocab_size": shape.vocab_size,
        "attention_width": shape.attention_width,
        "intermediate_size": shape.intermediate_size,
    }
    return policy_for(contract, **{**numbers, **changes})


def test_policy_names_the_layer_and_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"down_proj: K=1538 is not divisible by"):
        bound(intermediate_size=1538)
    with pytest.raises(ValueError, match=r"o_proj: .*tensor_parallel_size=8 would cut a leaf"):
        bound(tensor_parallel_size=8)
    # v1 where the trainer would cut what one rollout rank sums in one go.
    with pytest.raises(ValueError, match=r"o_proj: K=96 .*would cut a leaf"):
        bound("odd_k", V1, tensor_parallel_size=4)
    with pytest.raises(ValueError, match="unknown contract 'nope'"):
        bound(contract="nope")


def test_fingerprint_equals_the_rollouts() -> None:
    """Two packages, two builders of the same record: equal field by field."""
    from sglang_patch.contracts import SGLangRuntimePolicy
    from sglang_patch.schema import get_contract

    shape = SHAPES["tiny"]
    policy = bound()
    ours = fingerprint(policy, CPU, RopeTable(shape).on(CPU))
    theirs = SGLangRuntimePolicy(
        contract=get_contract(V2), segments=4, tensor_parallel_size=2, attention="reference"
    ).fingerprint(
        head_dim=shape.head_dim,
        max_position=shape.max_position_embeddings,
        rope_theta=shape.rope_theta,
        device="cpu",
    )
    assert ours.to_dict() == theirs.to_dict()
    other = fingerprint(replace(policy, segments=2), CPU, RopeTable(shape).on(CPU))
    assert other.differences(ours) == ["segments: 2 != 4"]
    triton = fingerprint(replace(policy, attention="triton"), CPU, RopeTable(shape).on(CPU))
    assert triton.differences(ours) == ["attention: 'triton' != 'reference'"]
    moved = RopeTable(replace(shape, rope_theta=1e4)).on(CPU)
    assert fingerprint(policy, CPU, moved).digest() != ours.digest()


def _config(**changes: object) -> PolicyTransformerConfig:
    shape = SHAPES["tiny"]
    settings = common_settings(
        shape,
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        context_parallel_size=1,
        device=CPU,
        recompute="none",
    )
    settings |= {"fp32_residual_connection": True, **changes}
    return PolicyTransformerConfig(**settings, policy=bound(), rope=RopeTable(shape))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequence_parallel", True),
        ("hidden_dropout", 0.1),
        ("fp32_residual_connection", False),
        ("normalization", "LayerNorm"),
    ],
)
def test_settings_that_break_the_contract_are_refused(name: str, value: object) -> None:
    _config()
    with pytest.raises(ValueError, match=f"{name}={value!r} must be"):
        _config(**{name: value})


def test_megatron_settings_may_add_and_not_contradict() -> None:
    assert merged({"a": 1}, {"b": 2, "a": 1}) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match=r"a=3 \(the run needs 1\)"):
        merged({"a": 1}, {"a": 3})


def test_rope_table_survives_a_model_wide_cast() -> None:
    from megatron_patch.layers.rope import PolicyRope

    module = torch.nn.Module()
    module.rope = PolicyRope(RopeTable(SHAPES["tiny"]))
    module.weight = torch.nn.Parameter(torch.ones(2))
    module.bfloat16()
    assert module.weight.dtype == torch.bfloat16
    assert module.rope.table.on(CPU).dtype == torch.float32


def test_cpu_platform_only_while_active() -> None:
    before = torch.cuda.current_device
    with cpu_platform.active():
        assert torch.zeros(2, device="cuda").device == CPU
        assert torch.zeros(2).cuda().device == CPU
        assert torch.zeros(2).to("cuda").device == CPU
        assert torch.zeros(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.cuda.current_device() == CPU
    assert torch.cuda.current_device is before
    assert torch.zeros(2).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


def test_cpu_platform_refuses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="has a GPU"), cpu_platform.active():
        pass


def test_tap_flips_one_element_and_passes_the_gradient() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    assert faults.tap(1, "o_proj", x) is x
    faults.set_fault(faults.parse_fault("1:o_proj:0:2"))
    try:
        out = faults.tap(1, "o_proj", x)
        different = out.detach().view(torch.int32) != x.detach().view(torch.int32)
        assert different.sum() == 1
        assert faults.tap(0, "o_proj", x) is x
        assert faults.tap(1, "down_proj", x) is x
        out.sum().backward()
        assert torch.equal(x.grad, torch.ones(3, 4))
    finally:
        faults.set_fault(None)


def _rank_config(**changes: object) -> TrainerRankConfig:
    shape = SHAPES["tiny"]
    values = {f.name: getattr(shape, f.name) for f in fields(shape)}
    values |= {"master_port": 1, "device": "cpu", "contract": V2, "segments": 1}
    return TrainerRankConfig(**{**values, "rollout_tensor_parallel_size": 1, **changes})


def test_rank_config_lists_every_violation() -> None:
    with pytest.raises(ValueError, match=r"tp \* pp \* cp = 2 \* 3 \* 1 = 6; num_hidden_layers=4"):
        _rank_config(world_size=2, tensor_parallel_size=2, pipeline_parallel_size=3)
    with pytest.raises(ValueError, match="stock layers have no taps"):
        _rank_config(contract="off", fault="0:rope")


def test_batch_must_add_up() -> None:
    assert len(Batch(tokens=[[1]], prompt_lengths=[1], response_lengths=[0])) == 1
    with pytest.raises(ValueError, match="sequence 1 has 2 tokens, not 1 of prompt"):
        Batch(tokens=[[1], [1, 2]], prompt_lengths=[1, 1], response_lengths=[0, 2])
    with pytest.raises(ValueError, match="at least one"):
        Batch(tokens=[], prompt_lengths=[], response_lengths=[])


def test_clipped_loss_by_hand() -> None:
    """Inside the range the ratio's gradient is A; beyond it, on the side that A pays for, none."""
    new = torch.tensor([0.0, 0.5, -0.5, 0.5], requires_grad=True)
    old = torch.zeros(4)
    advantages = torch.tensor([2.0, 1.0, 1.0, -1.0])
    loss, clipped = clipped_policy_loss(new, old, advantages, 0.2)
    ratio = np.exp(new.detach().numpy())
    wanted = -(2.0 + 1.2 + ratio[2] - ratio[3])
    assert loss.item() == pytest.approx(wanted, rel=1e-6)
    assert clipped == 3
    loss.backward()
    expected = [-2.0, 0.0, -ratio[2], ratio[3]]
    assert new.grad.tolist() == pytest.approx(expected, rel=1e-6)


def test_trainer_errors_before_and_during_a_step(ranks, model_folder) -> None:
    (messages,) = ranks.run(1, "trainer_errors", str(model_folder("small")), "small")
    assert "call load(model_path) first" in messages["not loaded"]
    assert "no response token" in messages["nothing to learn"]
    assert "sequence 1 has 2 response tokens and 1 logprobs" in messages["lengths"]
    assert "must be finite" in messages["nan"]
    assert "contradict the run: num_layers=9" in messages["megatron"]
    assert "no context parallelism" in messages["off with cp"]


@pytest.mark.parametrize(
    ("sequences", "tokens", "wanted"),
    [
        (2, 0, [(0, 2), (2, 4), (4, 5)]),
        (8, 0, [(0, 5)]),
        (1, 0, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),
        (8, 6, [(0, 2), (2, 3), (3, 5)]),
        # A sequence longer than the limit has a micro-batch of its own.
        (8, 1, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),
        (8, 5, [(0, 2), (2, 3), (3, 5)]),
        (8, 4, [(0, 1), (1, 2), (2, 3), (3, 5)]),
        (2, 100, [(0, 2), (2, 4), (4, 5)]),
        (8, 19, [(0, 5)]),
        (8, 18, [(0, 4), (4, 5)]),
    ],
)
def test_micro_batches_hold_at_most_their_sequences_and_tokens(
    sequences: int, tokens: int, wanted: list[tuple[int, int]]
) -> None:
    lengths = [3, 2, 10, 1, 3]
    batch = Batch(
        tokens=[[1] * length for length in lengths],
        prompt_lengths=[1] * len(lengths),
        response_lengths=[length - 1 for length in lengths],
    )
    spans = batch.spans(sequences, tokens)
    assert spans == wanted
    assert [i for start, stop in spans for i in range(start, stop)] == list(range(len(lengths)))
