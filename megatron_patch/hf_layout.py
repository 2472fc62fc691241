"""Which block of which Hugging Face tensor every rank's parameters hold.

A pure function of the shape and a rank's place, so that any rank knows what any other holds:
loading, saving, exporting and digests all read this one description.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import ModelShape


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's tensor- and pipeline-parallel coordinates and the sizes of both."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `local_rows` of a parameter are the block [rows, columns] of a Hugging Face tensor.

    All ranges are half-open. `columns` is None for a vector. `counted` is true on exactly one of
    the ranks that hold a block (context-parallel replicas aside).
    """

    parameter: str
    local_rows: tuple[int, int]
    name: str
    rows: tuple[int, int]
    columns: tuple[int, int] | None
    counted: bool = True

    @property
    def size(self) -> tuple[int, ...]:
        rows = self.rows[1] - self.rows[0]
        return (rows,) if self.columns is None else (rows, self.columns[1] - self.columns[0])


def hf_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint, in file order; a tied head is absent."""
    hidden, dim = shape.hidden_size, shape.head_dim
    keys = shape.num_key_value_heads * dim
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for i in range(shape.num_hidden_layers):
        layer = f"model.layers.{i}."
        tensors[layer + "input_layernorm.weight"] = (hidden,)
        for letter, rows in (("q", shape.attention_width), ("k", keys), ("v", keys)):
            tensors[f"{layer}self_attn.{letter}_proj.weight"] = (rows, hidden)
            if shape.attention_bias:
                tensors[f"{layer}self_attn.{letter}_proj.bias"] = (rows,)
        tensors[layer + "self_attn.o_proj.weight"] = (hidden, shape.attention_width)
        if shape.qk_layernorm:
            tensors[layer + "self_attn.q_norm.weight"] = (dim,)
            tensors[layer + "self_attn.k_norm.weight"] = (dim,)
        tensors[layer + "post_attention_layernorm.weight"] = (hidden,)
        tensors[layer + "mlp.gate_proj.weight"] = (shape.intermediate_size, hidden)
        tensors[layer + "mlp.up_proj.weight"] = (shape.intermediate_size, hidden)
        tensors[layer + "mlp.down_proj.weight"] = (hidden, shape.intermediate_size)
    tensors["model.norm.weight"] = (hidden,)
    if not shape.tie_word_embeddings:
        tensors["lm_head.weight"] = (shape.vocab_size, hidden)
    return tensors


def blocks(shape: ModelShape, place: RankPlace, padded_vocab_size: int) -> list[Block]:
    """Everything that the rank at `place` holds."""
    found: list[Block] = []
    hidden = shape.hidden_size
    table = padded_vocab_size // place.tp_size
    first = place.tp_rank * table
    real = max(0, min(table, shape.vocab_size - first))
    rows = (first, first + real)
    embedding, head = "embedding.word_embeddings.weight", "output_layer.weight"
    if place.first_stage and real:
        name = "model.embed_tokens.weight"
        found.append(Block(embedding, (0, real), name, rows, (0, hidden)))
    per_stage = shape.num_hidden_layers // place.pp_size
    for local in range(per_stage):
        found += _layer(shape, place, local, place.pp_rank * per_stage + local)
    if place.last_stage:
        found.append(
            _replicated("decoder.final_layernorm.weight", "model.norm.weight", hidden, place)
        )
        tied = shape.tie_word_embeddings
        if real and not (tied and place.first_stage):
            name = "model.embed_tokens.weight" if tied else "lm_head.weight"
            found.append(Block(head, (0, real), name, rows, (0, hidden), counted=not tied))
    return found


def _replicated(parameter: str, name: str, size: int, place: RankPlace) -> Block:
    return Block(parameter, (0, size), name, (0, size), None, counted=place.tp_rank == 0)


def _layer(shape: ModelShape, place: RankPlace, local: int, index: int) -> list[Block]:
    ours, theirs = f"decoder.layers.{local}.", f"model.layers.{index}."
    hidden, dim = shape.hidden_size, shape.head_dim
    found = [
        _replicated(ours + a, theirs + b, hidden, place)
        for a, b in (
            ("input_layernorm.weight", "input_layernorm.weight"),
            ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        )
    ]
    if shape.qk_layernorm:
        for letter in ("q", "k"):
            found.append(
                _replicated(
                    f"{ours}self_attention.{letter}_layernorm.weight",
                    f"{theirs}self_attn.{letter}_norm.weight",
                    dim,
                    place,
                )
            )
    for letter, local_rows, rows in _qkv_rows(shape, place):
        name = f"{theirs}self_attn.{letter}_proj."
        fused = ours + "self_attention.linear_qkv."
        found.append(Block(fused + "weight", local_rows, name + "weight", rows, (0, hidden)))
        if shape.attention_bias:
            found.append(Block(fused + "bias", local_rows, name + "bias", rows, None))
    width = shape.attention_width // place.tp_size
    columns = (place.tp_rank * width, (place.tp_rank + 1) * width)
    found.append(
        Block(
            ours + "self_attention.linear_proj.weight",
            (0, hidden),
            theirs + "self_attn.o_proj.weight",
            (0, hidden),
            columns,
        )
    )
    width = shape.intermediate_size // place.tp_size
    cut = (place.tp_rank * width, (place.tp_rank + 1) * width)
    for part, name in enumerate(("gate_proj", "up_proj")):
        local_rows = (part * width, (part + 1) * width)
        found.append(
            Block(
                ours + "mlp.linear_fc1.weight",
                local_rows,
                f"{theirs}mlp.{name}.weight",
                cut,
                (0, hidden),
            )
        )
    found.append(
        Block(
            ours + "mlp.linear_fc2.weight",
            (0, hidden),
            theirs + "mlp.down_proj.weight",
            (0, hidden),
            cut,
        )
    )
    return found


def _qkv_rows(
    shape: ModelShape, place: RankPlace
) -> list[tuple[str, tuple[int, int], tuple[int, int]]]:
    """(q, k or v; rows of this rank's fused shard; rows of the tensor).

    Megatron fuses by KV group, `q q k v | q q k v | ...`, and cuts the fused rows into equal
    shards, inside a group where there are fewer groups than ranks.
    """
    dim = shape.head_dim
    per_group = shape.num_attention_heads // shape.num_key_value_heads
    total = (shape.num_attention_heads + 2 * shape.num_key_value_heads) * dim
    shard = total // place.tp_size
    low, high = place.tp_rank * shard, (place.tp_rank + 1) * shard
    runs, start = [], 0
    for group in range(shape.num_key_value_heads):
        for letter, width in (("q", per_group * dim), ("k", dim), ("v", dim)):
            runs.append((letter, start, group * width, width))
            start += width
    found = []
    for letter, fused, row, width in runs:
        begin, end = max(fused, low), min(fused + width, high)
        if begin < end:
            offset = row - fused
            found.append((letter, (begin - low, end - low), (begin + offset, end + offset)))
    return found
