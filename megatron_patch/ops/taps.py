"""What a tap records while taps are on: one digest per op, layer and token row.

A token row is named by (sequence, position), not by where it stood in a batch, so that a prefill, a
decode step and a packed micro-batch can be laid beside each other. Sums over the tensor-parallel
shards of a row are left to the reader: a digest is additive in the columns (`digest.row_digests`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .digest import row_digests
from .fault import FINAL_OPS

# Rows of these exist only where a token is scored; rows of all others for every token.
SCORED_OPS = ("lm_head", "logprob")
_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True, kw_only=True)
class TapShape:
    """The sizes on which the columns of a row depend, by Hugging Face's names."""

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The rows of one op whose elements are stored as well: `tokens` are (sequence, position)."""

    layer: int | None
    op: str
    tokens: frozenset[tuple[int, int]]


def parse_kept(text: str) -> Kept:
    """Read `LAYER:OP:SEQUENCE,POSITION[;SEQUENCE,POSITION...]`, LAYER a number or `final`."""
    layer, op, tokens = text.split(":")
    pairs = [token.split(",") for token in tokens.split(";")]
    return Kept(
        layer=None if layer == "final" else int(layer),
        op=op,
        tokens=frozenset((int(sequence), int(position)) for sequence, position in pairs),
    )


def tap_name(layer: int | None, op: str) -> str:
    """`LAYER.OP`, or `final.OP` for the ops that belong to no layer."""
    return f"{'final' if layer is None or op in FINAL_OPS else layer}.{op}"


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


def tap_columns(op: str, shape: TapShape, rank: int, size: int, width: int) -> torch.Tensor:
    """[width] int64: where the elements of this rank's row stand in the global row of `op`.

    The layout is the checkpoint's: q, k, v one after the other, gate before up, heads in order.
    Rows that every rank holds whole count whole. Raises `ValueError` where `width` is another than
    the rank's share.
    """
    query = shape.num_attention_heads * shape.head_dim // size
    inner = shape.intermediate_size // size
    if op in ("q_norm", "rope", "attention"):
        columns = torch.arange(rank * query, (rank + 1) * query)
    elif op in ("k_norm", "rope_k"):
        columns = key_value_columns(shape, rank, size)
    elif op == "qkv_proj":
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
    elif op == "silu_mul":
        columns = torch.arange(rank * inner, (rank + 1) * inner)
    elif op == "gate_up_proj":
        gate = torch.arange(rank * inner, (rank + 1) * inner)
        columns = torch.cat((gate, gate + shape.intermediate_size))
    elif op == "lm_head":
        # Each side pads its table by its own rule; the pad columns do not count.
        columns = torch.arange(rank * width, (rank + 1) * width)
        columns = torch.where(columns < shape.vocab_size, columns, -1)
    else:
        columns = torch.arange(width)
    if columns.shape[0] != width:
        raise ValueError(
            f"tap {op}: rank {rank} of {size} has rows of {width} elements, its share of {shape} "
            f"is {columns.shape[0]}"
        )
    return columns


class TapLog:
    """The record of one rank. `at` says which tokens the coming rows are, `record` digests them."""

    def __init__(
        self,
        shape: TapShape,
        rank: int = 0,
        size: int = 1,
        *,
        layouts: Mapping[str, torch.Tensor] | None = None,
        kept: Kept | None = None,
    ) -> None:
        """layouts: columns of the ops whose rows stand in another order than the checkpoint's."""
        self._shape, self._rank, self._size, self._kept = shape, rank, size, kept
        self._columns = dict(layouts or {})
        self._tokens = self._scored = torch.empty((0, 2), dtype=torch.int64)
        self._digests: dict[str, list[torch.Tensor]] = {}
        self._rows: dict[str, torch.Tensor] = {}

    def at(self, tokens: torch.Tensor, scored: torch.Tensor) -> None:
        """tokens: [rows, 2] int64 on the CPU, (sequence, position) of every row of this forward
        pass, sequence -1 where a row is no token of the batch; scored: likewise the rows that go
        through the head."""
        self._tokens, self._scored = tokens, scored

    def record(self, layer: int | None, op: str, tensor: torch.Tensor) -> None:
        """tensor: [rows, ...], the result of `op`. Reads it and changes nothing.

        Raises `ValueError` where the rows are not those announced.
        """
        name = tap_name(layer, op)
        tokens = self._scored if op in SCORED_OPS else self._tokens
        if tensor.shape[0] != tokens.shape[0]:
            raise ValueError(
                f"tap {name}: {tensor.shape[0]} rows where {tokens.shape[0]} tokens were announced"
            )
        rows = tensor.detach().reshape(tensor.shape[0], -1)
        if op == "embedding":
            # The trainer widens its bf16 rows at once, the rollout in the first norm: exactly.
            rows = rows.float()
        if op not in self._columns:
            self._columns[op] = tap_columns(op, self._shape, self._rank, self._size, rows.shape[1])
        columns = self._columns[op] = self._columns[op].to(rows.device)
        real = tokens[:, 0] >= 0
        digests = row_digests(rows, columns)
        self._digests.setdefault(name, []).append(
            torch.cat((tokens, digests.unsqueeze(1)), dim=1)[real]
        )
        if self._kept is not None and name == tap_name(self._kept.layer, self._kept.op):
            self._keep(self._kept, rows, columns, tokens)

    def _keep(
        self, kept: Kept, rows: torch.Tensor, columns: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        for index, (sequence, position) in enumerate(tokens.tolist()):
            if (sequence, position) in kept.tokens:
                bits = rows[index].contiguous().view(_INTEGERS[rows.element_size()])
                self._rows[f"row.{rows.element_size()}.{sequence}.{position}"] = torch.stack(
                    (columns.cpu(), bits.cpu().to(torch.int64))
                )

    def dump(self) -> dict[str, torch.Tensor]:
        """Per tap `LAYER.OP` [n, 3] int64: sequence, position, digest (a token that was computed
        twice appears twice, in order). Per kept row `row.BYTES.SEQUENCE.POSITION` [2, width] int64:
        columns, bits."""
        return {**{name: torch.cat(parts) for name, parts in self._digests.items()}, **self._rows}
