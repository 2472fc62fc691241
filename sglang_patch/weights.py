"""Where each of this rank's weight shards lies in the checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .ops.digest import shard_digest

Shard = tuple[str, torch.Tensor, tuple[int, int], tuple[int, int]]


def _matrix(name: str, block: torch.Tensor, first_row: int, first_column: int = 0) -> Shard:
    width = 1 if block.dim() == 1 else block.shape[1]
    rows = (first_row, first_row + block.shape[0])
    return name, block, rows, (first_column, first_column + width)


def _qkv(prefix: str, module: Any) -> Iterator[Shard]:
    sizes = (
        module.num_heads * module.head_size,
        module.num_kv_heads * module.head_size,
        module.num_kv_heads * module.head_size,
    )
    replica, kv_rank = module.tp_rank % module.num_kv_head_replicas, module.tp_rank
    kv_rank //= module.num_kv_head_replicas
    for kind, parameter in module.named_parameters(recurse=False):
        blocks = parameter.split(sizes, dim=0)
        yield _matrix(f"{prefix}.q_proj.{kind}", blocks[0], module.tp_rank * sizes[0])
        if replica == 0:
            yield _matrix(f"{prefix}.k_proj.{kind}", blocks[1], kv_rank * sizes[1])
            yield _matrix(f"{prefix}.v_proj.{kind}", blocks[2], kv_rank * sizes[2])


def checkpoint_shards(model: torch.nn.Module) -> Iterator[Shard]:
    """(checkpoint name, block, row range, column range) of every block this rank contributes.

    A replicated tensor is contributed by the first rank that holds it; padding rows by none.
    Raises `ValueError` naming a parameter whose place is not known.
    """
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.linear import (
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    seen: set[int] = set()
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own or id(module) in seen:
            continue
        seen.add(id(module))
        parent = name.rsplit(".", 1)[0]
        if isinstance(module, QKVParallelLinear):
            yield from _qkv(parent, module)
        elif isinstance(module, MergedColumnParallelLinear):
            for kind, parameter in own.items():
                gate, up = parameter.chunk(2, dim=0)
                first = module.tp_rank * gate.shape[0]
                yield _matrix(f"{parent}.gate_proj.{kind}", gate, first)
                yield _matrix(f"{parent}.up_proj.{kind}", up, first)
        elif isinstance(module, RowParallelLinear):
            weight = own["weight"]
            yield _matrix(f"{name}.weight", weight, 0, module.tp_rank * weight.shape[1])
            if "bias" in own and module.tp_rank == 0:
                yield _matrix(f"{name}.bias", own["bias"], 0)
        elif isinstance(module, VocabParallelEmbedding):
            indices = module.shard_indices
            first, last = indices.org_vocab_start_index, indices.org_vocab_end_index
            if last > first:
                yield _matrix(f"{name}.weight", own["weight"][: last - first], first)
        elif isinstance(module, RMSNorm):
            if _tensor_parallel_rank() == 0:
                yield _matrix(f"{name}.weight", own["weight"], 0)
        else:
            raise ValueError(f"{name} ({type(module).__name__}): its shards have no known place")


def _tensor_parallel_rank() -> int:
    from . import state

    return state.require().ranks.rank


def shard_digests(model: torch.nn.Module) -> dict[str, int]:
    """This rank's share of every checkpoint tensor's digest; shares add modulo 2**64."""
    totals: dict[str, int] = {}
    for name, block, rows, columns in checkpoint_shards(model):
        totals[name] = totals.get(name, 0) + shard_digest(block, rows, columns)
    return totals
