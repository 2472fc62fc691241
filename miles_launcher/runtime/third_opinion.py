"""Two sides that disagree cannot say which is wrong: the op is computed a third time.

From the stored inputs, which are equal, and the checkpoint, the written order (`ops/*/reference`)
gives the row that both sides should have. On a CPU that judges every op. On a GPU it judges those
whose kernels claim the reference's bits; a product's inner order is the tensor core's own there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from megatron_patch.contracts import MegatronRuntimePolicy, policy_for
from megatron_patch.ops import (
    attention,
    linear,
    log_softmax,
    rms_norm,
    rope,
    rope_table,
    row_linear,
    silu_mul,
    temperature_logits,
)

from ..checkpoint import tensor_files
from ..parity.elements import StoredRow
from ..parity.flow import Place
from ..plan import LaunchPlan

_FLOATS = {2: (torch.int16, torch.bfloat16), 4: (torch.int32, torch.float32)}
_PRODUCTS = frozenset({"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head", "attention"})

# The rows that enter the op: name -> [rows, width], one row except for `key` and `value`.
Inputs = Mapping[str, torch.Tensor]


def can_judge(place: Place, device: str) -> bool:
    """Whether the reference's bits are what this op must have on this device."""
    return place.is_output and (device == "cpu" or place.op not in _PRODUCTS)


def row_tensor(row: StoredRow) -> torch.Tensor:
    """The global row [width] of a side, its shards put together."""
    values = np.zeros(row.width, dtype=np.int64)
    for columns, bits in row.ranks.values():
        values[columns] = bits
    integer, float_ = _FLOATS[row.size]
    return torch.from_numpy(values).to(integer).view(float_)


class Reference:
    """The model's ops in their written order, one row at a time, from a Hugging Face folder."""

    def __init__(self, plan: LaunchPlan, weights: Path) -> None:
        self._plan, self._model = plan, plan.model
        self._files = tensor_files(weights)
        self._policy: MegatronRuntimePolicy = policy_for(
            plan.contract,
            segments=plan.segments,
            rollout_tensor_parallel_size=plan.layout.rollout_tp,
            tensor_parallel_size=1,
            vocab_size=plan.model.vocab_size,
            attention_width=plan.model.num_attention_heads * plan.model.head_dim,
            intermediate_size=plan.model.intermediate_size,
        )

    def output(self, place: Place, inputs: Inputs, token: Mapping[str, Any]) -> torch.Tensor:
        """[width]: what `op` makes of its inputs. token: `id`, `position`, and `next`, the id of
        the token after it."""
        compute: dict[str, Callable[[], torch.Tensor]] = {
            "embedding": lambda: self._weight("model.embed_tokens.weight")[token["id"]].float(),
            "input_layernorm": lambda: self._norm(place, inputs["input"]),
            "post_attention_layernorm": lambda: self._norm(place, inputs["input"]),
            "final_norm": lambda: self._norm(place, inputs["input"]),
            "q_norm": lambda: self._norm(place, self._heads(inputs["input"])),
            "k_norm": lambda: self._norm(place, self._heads(inputs["input"])),
            "qkv_proj": lambda: self._column(place, "self_attn.", ("q", "k", "v"), inputs["input"]),
            "gate_up_proj": lambda: self._column(place, "mlp.", ("gate", "up"), inputs["input"]),
            "rope": lambda: self._rope(inputs["input"], token["position"]),
            "rope_k": lambda: self._rope(inputs["input"], token["position"]),
            "attention": lambda: self._attention(inputs),
            "o_proj": lambda: self._row(place, "self_attn.o_proj", inputs["input"]),
            "down_proj": lambda: self._row(place, "mlp.down_proj", inputs["input"]),
            "silu_mul": lambda: silu_mul(inputs["input"]),
            "lm_head": lambda: self._head(inputs["input"]),
            "temperature": lambda: self._temperature(inputs["input"]),
        }
        return compute[place.op]().flatten()

    def logprob(self, scaled: torch.Tensor, token: Mapping[str, Any]) -> torch.Tensor:
        """[1] fp32 from the row that the temperature left."""
        return log_softmax(scaled, self._policy.vocabulary)[:, token["next"]]

    def _weight(self, name: str) -> torch.Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def _named(self, place: Place, name: str) -> torch.Tensor:
        return self._weight(f"model.layers.{place.layer}.{name}")

    def _heads(self, row: torch.Tensor) -> torch.Tensor:
        return row.view(-1, self._model.head_dim)

    def _norm(self, place: Place, rows: torch.Tensor) -> torch.Tensor:
        inside = "self_attn." if place.op in ("q_norm", "k_norm") else ""
        weight = (
            self._weight("model.norm.weight")
            if place.layer is None
            else self._named(place, f"{inside}{place.op}.weight")
        )
        return rms_norm(rows, weight, self._model.rms_norm_eps)[0]

    def _column(
        self, place: Place, inside: str, letters: tuple[str, ...], row: torch.Tensor
    ) -> torch.Tensor:
        names = [f"{inside}{letter}_proj" for letter in letters]
        weight = torch.cat([self._named(place, f"{name}.weight") for name in names])
        bias = None
        if self._model.attention_bias and place.op == "qkv_proj":
            bias = torch.cat([self._named(place, f"{name}.bias") for name in names])
        return linear(row, weight, bias)

    def _row(self, place: Place, name: str, row: torch.Tensor) -> torch.Tensor:
        reduction = self._policy.row_reduction(place.op)
        return row_linear(row, self._named(place, f"{name}.weight"), None, reduction=reduction)

    def _rope(self, row: torch.Tensor, position: int) -> torch.Tensor:
        table = rope_table(self._model.head_dim, position + 1, self._model.rope_theta)
        heads = row.view(1, -1, self._model.head_dim)
        return rope(heads, heads, torch.tensor([position]), table)[0]

    def _attention(self, inputs: Inputs) -> torch.Tensor:
        dim = self._model.head_dim
        query, key, value = (
            inputs[name].view(inputs[name].shape[0], -1, dim) for name in ("query", "key", "value")
        )
        return attention(
            query,
            key,
            value,
            query_lengths=[1],
            key_lengths=[key.shape[0]],
            scale=dim**-0.5,
        )

    def _head(self, row: torch.Tensor) -> torch.Tensor:
        tied = self._model.tie_word_embeddings
        weight = self._weight("model.embed_tokens.weight" if tied else "lm_head.weight")
        return linear(row, weight, out_dtype=self._policy.logits_dtype)

    def _temperature(self, row: torch.Tensor) -> torch.Tensor:
        temperature = torch.tensor(self._plan.run.temperature, dtype=torch.float32)
        return temperature_logits(row, temperature)


def guilty_side(
    expected: torch.Tensor, rows: Mapping[str, StoredRow]
) -> tuple[str, int | None] | None:
    """(side, tensor-parallel rank) of the one that is unlike the reference where the other equals
    it; the rank where one alone of that side is unlike. None where that does not decide."""
    wrong: dict[str, list[int]] = {}
    integer, _ = _FLOATS[expected.element_size()]
    bits = expected.view(integer).to(torch.int64).numpy() & ((1 << 8 * expected.element_size()) - 1)
    for side, row in rows.items():
        if row.size != expected.element_size() or row.width > len(bits):
            return None
        wrong[side] = [
            rank
            for rank, (columns, mine) in row.ranks.items()
            if not np.array_equal(bits[columns], mine)
        ]
    guilty = [side for side, ranks in wrong.items() if ranks]
    if len(guilty) != 1:
        return None
    ranks = wrong[guilty[0]]
    return guilty[0], ranks[0] if len(ranks) == 1 else None
