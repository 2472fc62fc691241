"""Turning the taps of a trainer rank on: its place, its layout, its tokens.

Each pipeline stage records the layers it owns, each context-parallel rank its tokens, each
tensor-parallel rank its columns.
"""

from __future__ import annotations

from typing import Any

import torch

from . import faults
from .config import ModelShape
from .ops.taps import TapLog, TapShape, parse_kept
from .parallel import MicroBatch


def fused_qkv_columns(shape: ModelShape, rank: int, size: int) -> torch.Tensor:
    """[local width] int64: where megatron's fused qkv row, `q q k v | q q k v | ...` cut into
    equal shards, stands in a row of all q, then all k, then all v."""
    dim, groups = shape.head_dim, shape.num_key_value_heads
    query, keys = shape.attention_width, groups * dim
    numbers = (
        torch.arange(query).view(groups, -1),
        torch.arange(query, query + keys).view(groups, dim),
        torch.arange(query + keys, query + 2 * keys).view(groups, dim),
    )
    return torch.cat(numbers, dim=1).flatten().chunk(size)[rank].clone()


def start_taps(shape: ModelShape, rank: int, size: int, keep: str | None = None) -> None:
    """Record from now on. rank, size: tensor-parallel; `keep` names rows to store whole
    (`ops.taps.parse_kept`)."""
    faults.set_log(
        TapLog(
            TapShape(
                intermediate_size=shape.intermediate_size,
                num_attention_heads=shape.num_attention_heads,
                num_key_value_heads=shape.num_key_value_heads,
                head_dim=shape.head_dim,
                vocab_size=shape.vocab_size,
            ),
            rank,
            size,
            layouts={"qkv_proj": fused_qkv_columns(shape, rank, size)},
            kept=None if keep is None else parse_kept(keep),
        )
    )


def announce(batch: MicroBatch) -> None:
    """Name the rows of the coming forward pass, where taps are on."""
    log = faults.active_log()
    if log is None:
        return
    tokens = torch.stack((batch.sequences, batch.positions), dim=1)
    scored = tokens.index_select(0, batch.scored)
    # A rank that scores nothing sends one row through the head all the same.
    scored[batch.num_scored :, 0] = -1
    log.at(tokens.cpu(), head=scored.cpu(), scored=scored.cpu())


def finish_taps() -> dict[str, Any]:
    """Stop recording; what was recorded (`TapLog.dump`)."""
    log = faults.active_log()
    if log is None:
        raise ValueError("taps were not started in this rank")
    faults.set_log(None)
    return log.dump()
