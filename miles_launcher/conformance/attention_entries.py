"""The attention kernels of a GPU, each with what it can be asked. Imports Triton."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

Launched = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class AttentionEntry:
    """One way to launch. Entries of one `order` must agree bit for bit; `head_dims` None: any."""

    name: str
    order: str
    launch: Callable[..., Launched]
    head_dims: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        return self.name


def run_attention(entry: AttentionEntry, *arguments: Any) -> Launched:
    """`entry` on the arguments of the op's launcher: query, key, value, lengths, lengths, scale."""
    return entry.launch(*arguments)


def _starts(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class TritonLaunch:
    """The Triton path with a tile, or with a decode step's chunks over so many programs. Named, not
    a closure: it travels to the processes of real ranks."""

    tile: Any = None
    programs: int = 1
    paged: bool = False

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: list[int],
        keys: list[int],
        scale: float,
    ) -> Launched:
        module = importlib.import_module("sglang_patch.ops.attention.kernel_triton")
        where = module.PackedKeys(_starts(keys, q.device))
        if self.paged:
            k, v, where = _in_pages(module, k, v, keys)
        one = max(queries) == 1
        out, lse = module.launch_keys(
            q,
            k,
            v,
            where,
            scale=scale,
            query_starts=None if one else _starts(queries, q.device),
            longest_query=max(queries),
            longest_key=max(keys),
            tile=None if one and self.programs > 1 else self.tile,
            programs=self.programs if one else None,
        )
        return out, lse


def _in_pages(module: Any, k: torch.Tensor, v: torch.Tensor, keys: list[int]) -> tuple[Any, ...]:
    """A cache of shuffled slots among other requests' numbers, and the table that finds them."""
    count, generator = k.shape[0], torch.Generator().manual_seed(110)
    slots = torch.randperm(count + 64, generator=generator)[:count]
    cached = [t.new_full((count + 64, *t.shape[1:]), 9.0) for t in (k, v)]
    for mine, there in zip((k, v), cached, strict=True):
        there[slots.to(there.device)] = mine
    requests = torch.randperm(len(keys) + 3, generator=generator)[: len(keys)]
    table = torch.zeros(len(keys) + 3, max(keys) + 5, dtype=torch.int32)
    for request, part, length in zip(requests.tolist(), slots.split(keys), keys, strict=True):
        table[request, :length] = part.int()
    lengths = torch.tensor(keys)
    where = module.PagedKeys(*(t.to(k.device) for t in (lengths, table, requests)))
    return *cached, where


def attention_entries() -> tuple[AttentionEntry, ...]:
    """What this GPU may be asked to launch."""
    kernel = importlib.import_module("sglang_patch.ops.attention.kernel")
    tiles = importlib.import_module("sglang_patch.ops.attention.kernel_triton").TILES
    entries = [AttentionEntry("triton", "triton", kernel.launch_triton)]
    entries += [
        AttentionEntry(f"triton, {tile.rows} rows", "triton", TritonLaunch(tile)) for tile in tiles
    ]
    entries += [
        AttentionEntry("triton, decode over 3 programs", "triton", TritonLaunch(programs=3)),
        AttentionEntry("triton, pages of one key", "triton", TritonLaunch(paged=True)),
        AttentionEntry(
            "triton, pages over 2 programs", "triton", TritonLaunch(programs=2, paged=True)
        ),
    ]
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        entries.append(AttentionEntry("flash3", "flash3", kernel.launch_flash3, (128,)))
    return tuple(entries)
