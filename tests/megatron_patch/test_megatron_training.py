"""The training step over real ranks: gradients, repeatability, recompute, exactness afterwards."""

from __future__ import annotations

from typing import Any

import megatron_oracle as oracle
import numpy as np
import pytest
import torch
from megatron_models import SHAPES, V2, batch_for
from megatron_tasks import whole_gradients
from safetensors.torch import load_file

_CACHE: dict[Any, Any] = {}


def train(ranks, model_folder, name: str, layout: tuple[int, int, int], **options: Any):  # noqa: ANN001, ANN201
    key = (name, layout, tuple(sorted(options.items())))
    if key not in _CACHE:
        world = layout[0] * layout[1] * layout[2]
        folder = str(model_folder(name))
        want = ("train", "gradients")
        _CACHE[key] = ranks.run(world, "score_and_train", folder, name, layout, options, want)
    return _CACHE[key]


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.int32)


# Two fp32 sums of the same n products, in two orders, differ by at most about n * 2**-24 of the sum
# of magnitudes. These are some tens of tokens, so 8 ulps of the tensor's largest entry is ample for
# fp32 and 1/1000 of what one rounding to bf16 would leave.
FP32_ROUNDING = 8 * 2.0**-23


@pytest.mark.parametrize("layout", [(2, 1, 1), (4, 1, 1)])
def test_gradients_do_not_depend_on_tensor_parallelism(ranks, model_folder, layout) -> None:
    one = train(ranks, model_folder, "tiny", (1, 1, 1))
    many = train(ranks, model_folder, "tiny", layout)
    ours, theirs = whole_gradients(many, "tiny"), whole_gradients(one, "tiny")
    for name, reference in theirs.items():
        assert np.abs(reference).max() > 0, name
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            # Summed over the heads, which the ranks share, by megatron's all-reduce.
            difference = np.abs(ours[name] - reference).max()
            assert difference <= FP32_ROUNDING * np.abs(reference).max(), name
        else:
            assert np.array_equal(bits(ours[name]), bits(reference)), name
    norms = [r["train"]["grad_norm"] for r in (*one, *many)]
    # A loss gradient that were summed over the ranks would make the norm tp times larger.
    assert max(norms) - min(norms) <= 2.0**-23 * max(norms)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("small", (1, 2, 1)),
        ("small", (1, 1, 2)),
        ("small", (2, 2, 1)),
        ("small", (2, 1, 2)),
        ("untied", (1, 2, 1)),
        ("bias", (2, 1, 1)),
    ],
)
def test_gradients_do_not_depend_on_pipeline_and_context(ranks, model_folder, name, layout) -> None:
    one = train(ranks, model_folder, name, (1, 1, 1))
    many = train(ranks, model_folder, name, layout)
    ours, theirs = whole_gradients(many, name), whole_gradients(one, name)
    for key, reference in theirs.items():
        difference = np.abs(ours[key] - reference).max()
        assert difference <= FP32_ROUNDING * np.abs(reference).max(), key
    assert many[0]["train"]["grad_norm"] == pytest.approx(one[0]["train"]["grad_norm"], rel=1e-6)
    assert many[0]["train"]["loss"] == pytest.approx(one[0]["train"]["loss"], rel=1e-6)
    assert len({r["train"]["loss"] for r in many}) == 1


@pytest.mark.parametrize("layout", [(4, 1, 1), (2, 1, 2), (1, 1, 4)])
def test_shared_kv_heads_have_the_right_gradient(ranks, model_folder, layout) -> None:
    """Each sharer rounds its part of dK and dV to bf16 before they are summed in fp32, so these
    agree to a few bf16 roundings (2**-8), not to fp32. A lost or doubled part would be off by
    tens of per cent."""
    one = train(ranks, model_folder, "shared_kv", (1, 1, 1))
    many = train(ranks, model_folder, "shared_kv", layout)
    ours, theirs = whole_gradients(many, "shared_kv"), whole_gradients(one, "shared_kv")
    for key, reference in theirs.items():
        assert np.abs(ours[key] - reference).max() <= 4 * 2.0**-8 * np.abs(reference).max(), key


def test_the_gradient_is_that_of_plain_autograd(ranks, model_folder) -> None:
    """The whole model's loss differentiated by PyTorch through a float64 copy of the arithmetic."""
    result = train(ranks, model_folder, "small", (1, 1, 1), clip_grad=1e9)
    found = whole_gradients(result, "small")
    reference = oracle_gradients("small", model_folder("small"), result[0]["scores"])
    for key, wanted in reference.items():
        error = np.linalg.norm(found[key] - wanted) / np.linalg.norm(wanted)
        # Activations and their gradients are bf16 (2**-9 each), over two layers.
        assert error < 0.03, (key, error)


def rotated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    cos, sin = (t.unsqueeze(1) for t in table.chunk(2, dim=-1))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def oracle_gradients(name: str, folder: Any, scores: list[np.ndarray]) -> dict[str, np.ndarray]:
    from megatron_models import ADVANTAGES, TEMPERATURE

    shape, batch = SHAPES[name], batch_for(name)
    tensors = {
        k: v.double().requires_grad_() for k, v in load_file(folder / "model.safetensors").items()
    }

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + shape.rms_norm_eps) * weight

    loss = torch.zeros((), dtype=torch.float64)
    for number, tokens in enumerate(batch.tokens):
        prompt, response = batch.prompt_lengths[number], batch.response_lengths[number]
        length = len(tokens)
        table = oracle._table(shape, length).double()
        stream = tensors["model.embed_tokens.weight"][tokens]
        for i in range(shape.num_hidden_layers):
            w = {
                k.removeprefix(f"model.layers.{i}."): v
                for k, v in tensors.items()
                if k.startswith(f"model.layers.{i}.")
            }
            x = norm(stream, w["input_layernorm.weight"])
            q, k, v = (
                (x @ w[f"self_attn.{a}_proj.weight"].T).view(length, -1, shape.head_dim)
                for a in "qkv"
            )
            q, k = norm(q, w["self_attn.q_norm.weight"]), norm(k, w["self_attn.k_norm.weight"])

            group = shape.num_attention_heads // shape.num_key_value_heads
            q, k, v = (
                y.transpose(0, 1)
                for y in (
                    rotated(q, table),
                    rotated(k, table).repeat_interleave(group, 1),
                    v.repeat_interleave(group, 1),
                )
            )
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            out = out.transpose(0, 1).reshape(length, -1)
            stream = stream + out @ w["self_attn.o_proj.weight"].T
            x = norm(stream, w["post_attention_layernorm.weight"])
            x = torch.nn.functional.silu(x @ w["mlp.gate_proj.weight"].T) * (
                x @ w["mlp.up_proj.weight"].T
            )
            stream = stream + x @ w["mlp.down_proj.weight"].T
        rows = norm(stream, tensors["model.norm.weight"])[prompt - 1 : prompt - 1 + response]
        logits = rows @ tensors["model.embed_tokens.weight"].T / TEMPERATURE
        logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[prompt:])[:, None])
        old = torch.from_numpy(scores[number] - np.float32(0.01)).double().unsqueeze(1)
        ratio = torch.exp(logprobs - old)
        advantage = ADVANTAGES[number]
        clipped = ratio.clamp(0.8, 1.2)
        loss = loss - torch.minimum(ratio * advantage, clipped * advantage).sum()
    (loss / batch.num_response_tokens).backward()
    return {k: v.grad.numpy() for k, v in tensors.items()}


def test_the_same_bits_on_a_second_run_and_under_recompute(ranks, model_folder) -> None:
    layout = (2, 1, 1)
    first = train(ranks, model_folder, "small", layout)
    again = ranks.run(
        2,
        "score_and_train",
        str(model_folder("small")),
        "small",
        layout,
        {},
        ("train", "gradients"),
    )
    full = train(ranks, model_folder, "small", layout, recompute="full")
    wanted = whole_gradients(first, "small")
    for other in (again, full):
        found = whole_gradients(other, "small")
        for key, value in wanted.items():
            assert np.array_equal(bits(found[key]), bits(value)), key
        assert other[0]["digest_after"] == first[0]["digest_after"]


def test_recompute_runs_the_layers_again(ranks, model_folder) -> None:
    counts = {}
    for recompute in ("none", "full"):
        (result,) = ranks.run(
            1,
            "count_calls_of_a_step",
            str(model_folder("small")),
            "small",
            {"recompute": recompute},
        )
        counts[recompute] = result
    assert counts["full"]["attention"] == 2 * counts["none"]["attention"]
    assert counts["full"]["log_softmax:segments"] == counts["none"]["log_softmax:segments"]


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_exact_again_after_the_update(ranks, model_folder, layout, tmp_path) -> None:
    """The oracle on the exported Hugging Face tensors equals the trainer's next score."""
    results = ranks.run(
        layout[0] * layout[1] * layout[2],
        "step_export_and_score",
        str(model_folder("small")),
        "small",
        layout,
        str(tmp_path / "saved"),
    )
    exported = {k: torch.from_numpy(v).view(torch.bfloat16) for k, v in results[0]["export"]}
    assert all(not r["export"] for r in results[1:])
    original = load_file(model_folder("small") / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all(
        not torch.equal(exported[k].view(torch.int16), original[k].view(torch.int16))
        for k in original
    )
    wanted = oracle.contract_scores("small", exported, batch_for("small"), V2, 4)
    for result in results:
        assert np.array_equal(bits(np.concatenate(result["scores"])), bits(np.concatenate(wanted)))
        assert result["digest"] == results[0]["saved_digest"]
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for key, value in exported.items():
        assert torch.equal(saved[key].view(torch.int16), value.view(torch.int16)), key
    assert (tmp_path / "saved" / "config.json").is_file()


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (4, 1, 1)])
def test_padding_rows_get_no_gradient(ranks, model_folder, layout) -> None:
    results = train(ranks, model_folder, "tiny", layout)
    found = [r["padding_gradient"] for r in results]
    assert max(found) == 0.0, "the last rank holds the padding rows, and they must stay untouched"
