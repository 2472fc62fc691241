"""Where the elements of a rank's row stand in the global row, for every tapped tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

OUTPUT = "output"
# Rows that every tensor-parallel rank holds whole: hidden states, and the one logprob.
HIDDEN, LOGPROB = WHOLE = ("hidden", "logprob")

# The tensors that enter each op, with the layout of their rows: that of the op they come from.
INPUTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "input_layernorm": {"input": HIDDEN},
        "qkv_proj": {"input": HIDDEN},
        "q_norm": {"input": "q_norm"},
        "k_norm": {"input": "k_norm"},
        "rope": {"input": "rope"},
        "rope_k": {"input": "rope_k"},
        "attention": {"query": "rope", "key": "rope_k", "value": "rope_k"},
        "o_proj": {"input": "attention"},
        "post_attention_layernorm": {"input": HIDDEN},
        "gate_up_proj": {"input": HIDDEN},
        "silu_mul": {"input": "gate_up_proj"},
        "down_proj": {"input": "silu_mul"},
        "final_norm": {"input": HIDDEN},
        "lm_head": {"input": HIDDEN},
        "temperature": {"input": "lm_head"},
    }
)
_OUTPUTS = MappingProxyType(
    {
        **dict.fromkeys(("embedding", "input_layernorm", "o_proj"), HIDDEN),
        **dict.fromkeys(("post_attention_layernorm", "down_proj", "final_norm"), HIDDEN),
        "logprob": LOGPROB,
        "temperature": "lm_head",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TapShape:
    """The sizes on which the columns of a row depend, by Hugging Face's names."""

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


def layout_of(op: str, name: str = OUTPUT) -> str:
    """The layout of the result of `op`, or of what enters it as `name`; `KeyError` for others."""
    return _OUTPUTS.get(op, op) if name == OUTPUT else INPUTS[op][name]


def key_value_columns(shape: TapShape, rank: int, size: int) -> torch.Tensor:
    """[local width] int64: the columns of this rank's key (or value) heads in all of them.

    Where ranks share a head, the first of them counts and the others' copies are -1.
    """
    heads, dim = shape.num_key_value_heads, shape.head_dim
    if heads >= size:
        width = heads // size * dim
        return torch.arange(rank * width, (rank + 1) * width)
    shared = size // heads
    if rank % shared:
        return torch.full((dim,), -1)
    return torch.arange(dim) + rank // shared * dim


def tap_columns(layout: str, shape: TapShape, rank: int, size: int, width: int) -> torch.Tensor:
    """[width] int64: where the elements of this rank's row stand in the global row of `layout`.

    The order is the checkpoint's: q, k, v one after the other, gate before up, heads in order.
    Rows that every rank holds whole count whole. Raises `ValueError` where `width` is another than
    the rank's share.
    """
    query = shape.num_attention_heads * shape.head_dim // size
    inner = shape.intermediate_size // size
    if layout in ("q_norm", "rope", "attention"):
        columns = torch.arange(rank * query, (rank + 1) * query)
    elif layout in ("k_norm", "rope_k"):
        columns = key_value_columns(shape, rank, size)
    elif layout == "qkv_proj":
        keys = key_value_columns(shape, rank, size)
        before = shape.num_attention_heads * shape.head_dim
        total = shape.num_key_value_heads * shape.head_dim
        columns = torch.cat(
            (
                torch.arange(rank * query, (rank + 1) * query),
                torch.where(keys < 0, keys, keys + before),
                torch.where(keys < 0, keys, keys + before + total),
            )
        )
    elif layout == "silu_mul":
        columns = torch.arange(rank * inner, (rank + 1) * inner)
    elif layout == "gate_up_proj":
        gate = torch.arange(rank * inner, (rank + 1) * inner)
        columns = torch.cat((gate, gate + shape.intermediate_size))
    elif layout == "lm_head":
        # Each side pads its table by its own rule; the pad columns do not count.
        columns = torch.arange(rank * width, (rank + 1) * width)
        columns = torch.where(columns < shape.vocab_size, columns, -1)
    else:
        assert layout in WHOLE, layout
        columns = torch.arange(width)
    if columns.shape[0] != width:
        raise ValueError(
            f"tap layout {layout}: rank {rank} of {size} has rows of {width} elements, its share "
            f"of {shape} is {columns.shape[0]}"
        )
    return columns
