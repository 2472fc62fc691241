"""The whole model in plain PyTorch, one sequence at a time: straight loops over `*/reference.py`.

Shares no code with the trainer but the reference of each op and the schema: no packing, no shards,
no fused weights, no padded vocabulary. Row-parallel sums come from the row_linear oracle, which
walks the association of the global K.
"""

from __future__ import annotations

import numpy as np
import torch
from megatron_models import SHAPES, TEMPERATURE

from megatron_patch.config import ModelShape
from megatron_patch.ops.attention import reference as attention
from megatron_patch.ops.linear import reference as linear
from megatron_patch.ops.log_softmax import reference as log_softmax
from megatron_patch.ops.rms_norm import reference as rms_norm
from megatron_patch.ops.rope import reference as rope
from megatron_patch.ops.row_linear import reference as row_linear
from megatron_patch.ops.silu_mul import reference as silu_mul
from megatron_patch.schema import RowReduction, get_contract, row_reduction, vocabulary_segments
from miles_launcher.runtime.batch import Batch

BF16 = torch.bfloat16


def _table(shape: ModelShape, length: int) -> torch.Tensor:
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    frequencies = 1.0 / (shape.rope_theta**exponents)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.cat((angles.double().cos(), angles.double().sin()), dim=-1).float()


def hidden_states(
    tensors: dict[str, torch.Tensor],
    shape: ModelShape,
    tokens: list[int],
    o_proj: RowReduction,
    down_proj: RowReduction,
) -> torch.Tensor:
    """[tokens, hidden] bf16 after the final norm."""
    eps, length = shape.rms_norm_eps, len(tokens)
    positions = torch.arange(length)
    table = _table(shape, length)
    stream = tensors["model.embed_tokens.weight"][tokens].float()
    x: torch.Tensor | None = None
    for i in range(shape.num_hidden_layers):
        layer = f"model.layers.{i}."

        def weight(name: str, layer: str = layer) -> torch.Tensor:
            return tensors[layer + name]

        norm = weight("input_layernorm.weight")
        # As the rollout: the previous layer's output meets its residual inside this norm.
        if x is None:
            x, stream = rms_norm.rms_norm(stream, norm, None, eps)
        else:
            x, stream = rms_norm.rms_norm(x, norm, stream, eps)
        heads = []
        for letter in ("q", "k", "v"):
            bias = tensors.get(f"{layer}self_attn.{letter}_proj.bias")
            out = linear.linear(x, weight(f"self_attn.{letter}_proj.weight"), bias, BF16)
            out = out.view(length, -1, shape.head_dim)
            if shape.qk_layernorm and letter != "v":
                out = rms_norm.rms_norm(out, weight(f"self_attn.{letter}_norm.weight"), None, eps)[
                    0
                ]
            heads.append(out)
        query, key = rope.rope(heads[0], heads[1], positions, table)
        out = attention.attention(
            query, key, heads[2], [length], [length], shape.head_dim**-0.5
        ).reshape(length, -1)
        x = row_linear.row_linear(out, weight("self_attn.o_proj.weight"), None, o_proj)
        norm = weight("post_attention_layernorm.weight")
        x, stream = rms_norm.rms_norm(x, norm, stream, eps)
        gate = linear.linear(x, weight("mlp.gate_proj.weight"), None, BF16)
        up = linear.linear(x, weight("mlp.up_proj.weight"), None, BF16)
        x = silu_mul.silu_mul(torch.cat((gate, up), dim=-1))
        x = row_linear.row_linear(x, weight("mlp.down_proj.weight"), None, down_proj)
    return rms_norm.rms_norm(x, tensors["model.norm.weight"], stream, eps)[0]


def scores(
    name: str,
    tensors: dict[str, torch.Tensor],
    batch: Batch,
    contract: str,
    o_proj: RowReduction,
    down_proj: RowReduction,
) -> list[np.ndarray]:
    """Logprobs of every response token, per sequence."""
    shape = SHAPES[name]
    rule = get_contract(contract).logprob
    logits_dtype = {"bfloat16": BF16, "float32": torch.float32}[rule.logits_dtype]
    segments = vocabulary_segments(contract, shape.vocab_size)
    real = [segments.real_columns(i) for i in range(segments.num_segments)]
    tied = shape.tie_word_embeddings
    head = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    found = []
    for tokens, prompt, response in zip(
        batch.tokens, batch.prompt_lengths, batch.response_lengths, strict=True
    ):
        if response == 0:
            found.append(np.zeros(0, np.float32))
            continue
        hidden = hidden_states(tensors, shape, tokens, o_proj, down_proj)
        rows = hidden[prompt - 1 : prompt - 1 + response]
        logits = linear.linear(rows, head, None, logits_dtype)
        logits = logits.float() / torch.tensor(TEMPERATURE, dtype=torch.float32)
        largest, total = log_softmax.segment_statistics(
            logits, segments.width, segments.num_segments, real
        )
        normaliser = log_softmax.combine_segments(largest, total)
        chosen = logits[torch.arange(response), torch.tensor(tokens[prompt:])]
        found.append((chosen - normaliser).numpy())
    return found


def contract_scores(
    name: str,
    tensors: dict[str, torch.Tensor],
    batch: Batch,
    contract: str,
    segments: int,
    rollout_tp: int = 1,
) -> list[np.ndarray]:
    """`scores` in the order of a contract."""
    shape = SHAPES[name]
    cut = {"rollout_tp": rollout_tp, "segments": segments}
    return scores(
        name,
        tensors,
        batch,
        contract,
        row_reduction(contract, shape.attention_width, **cut),
        row_reduction(contract, shape.intermediate_size, **cut),
    )
