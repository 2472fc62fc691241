"""Model shapes of the tests, their seeded weights, and the batch that every layout scores."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_patch.config import ModelShape
from megatron_patch.hf_layout import hf_tensors
from miles_launcher.runtime.batch import Batch

V1 = "qwen3_dense_true_on_policy_v1"
V2 = "qwen3_dense_true_on_policy_v2"
TEMPERATURE = 0.8

# The profile qwen3-tiny: 12 tiles in down_proj (runs of 3), a vocabulary that needs padding.
_TINY = ModelShape(
    hidden_size=256,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=500,
    max_position_embeddings=4096,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
)


def _shape(**changes: Any) -> ModelShape:
    small: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "head_dim": 32,
        "vocab_size": 130,
        "max_position_embeddings": 128,
    }
    values = {name: getattr(_TINY, name) for name in ModelShape.__slots__}
    return ModelShape(**{**values, **small, **changes})


SHAPES = {
    "tiny": _TINY,
    "small": _shape(),
    "untied": _shape(tie_word_embeddings=False),
    # Qwen2.5: a bias on q, k, v and no norm per head.
    "bias": _shape(attention_bias=True, qk_layernorm=False),
    # Fewer KV heads than tensor-parallel ranks.
    "shared_kv": _shape(num_key_value_heads=2, tie_word_embeddings=False),
    # K of the row-parallel sums is no multiple of the 128-wide tile at any degree.
    "odd_k": _shape(
        num_attention_heads=4, head_dim=24, num_key_value_heads=2, intermediate_size=192
    ),
}


def weights(name: str) -> dict[str, torch.Tensor]:
    """Seeded bf16 tensors by Hugging Face name, norm weights away from 1, large enough that the
    order of every sum shows."""
    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for key, size in hf_tensors(shape).items():
        noise = torch.randn(size, generator=generator)
        # A large row-parallel output, so that its last bit survives the next norm's rounding.
        scale = 0.2 if key.endswith(("o_proj.weight", "down_proj.weight")) else 0.05
        tensors[key] = (1 + 0.3 * noise if "norm" in key else scale * noise).bfloat16()
    return tensors


def write_folder(folder: Path, name: str) -> None:
    save_file(weights(name), folder / "model.safetensors", {"format": "pt"})
    tied = SHAPES[name].tie_word_embeddings
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))


def batch_for(name: str) -> Batch:
    """Odd lengths, a response of one token, an empty response, a prompt of one token."""
    parts = [(5, 4), (3, 2), (8, 1), (7, 0), (1, 1), (12, 9)]
    if name != "tiny":
        # Narrow models need more rows before the order of a sum shows.
        parts = [(9, 30), (3, 2), (28, 1), (7, 0), (1, 1), (12, 41)]
    draw = random.Random(3)
    vocab = SHAPES[name].vocab_size
    return Batch(
        tokens=[[draw.randrange(vocab) for _ in range(p + r)] for p, r in parts],
        prompt_lengths=[p for p, _ in parts],
        response_lengths=[r for _, r in parts],
    )


ADVANTAGES = [1.0, -1.0, 0.5, 1.0, 2.0, -0.3]
