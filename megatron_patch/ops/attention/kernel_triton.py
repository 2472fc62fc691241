"""Causal attention in Triton: one order for prefill, chunked prefill, cached prefixes and decode.

`blocks.py` has the order. Rows of a tile are (query, head of the key head's group) pairs, so a
decode step fills a 16-row tile with one token's heads and a prefill packs several tokens into a
taller one; a row's bits do not depend on the tile. Keys come packed, or through a table of cache
slots (pages of one key). Nothing is read back from the device, so a launch can be captured in a
CUDA graph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import triton
import triton.language as tl

from ..elementary_kernel import UNFUSED
from ..launch import launch
from .blocks import BLOCK_KEYS, CHUNK_BLOCKS, add_chunk, finish, no_keys, visit_block

_LOG2E: Final = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Rows of a program, warps, pipeline stages. Any tile has the same bits."""

    rows: int
    warps: int
    stages: int


@triton.jit
def _extent(
    sequence, query_starts_ptr, key_starts_ptr, key_lengths_ptr,
    PAGED: tl.constexpr, ONE_QUERY: tl.constexpr,
):  # fmt: skip
    """(first query, queries, first key, keys) of a sequence."""
    if ONE_QUERY:
        query_start, queries = sequence, 1
    else:
        query_start = tl.load(query_starts_ptr + sequence).to(tl.int32)
        queries = tl.load(query_starts_ptr + sequence + 1).to(tl.int32) - query_start
    if PAGED:
        key_start = 0
        keys = tl.load(key_lengths_ptr + sequence).to(tl.int32)
    else:
        key_start = tl.load(key_starts_ptr + sequence).to(tl.int32)
        keys = tl.load(key_starts_ptr + sequence + 1).to(tl.int32) - key_start
    return query_start, queries, key_start, keys


@triton.jit
def _slots(sequence, table_ptr, requests_ptr, table_stride, PAGED: tl.constexpr):
    """Where the cache slots of a sequence's keys are listed."""
    slot_ptr = table_ptr
    if PAGED:
        slot_ptr += tl.load(requests_ptr + sequence).to(tl.int64) * table_stride
    return slot_ptr


@triton.jit(do_not_specialize=["tokens", "table_stride"])
def attention_kernel(
    query_ptr, key_ptr, value_ptr, out_ptr, lse_ptr,
    query_starts_ptr, key_starts_ptr, key_lengths_ptr, table_ptr, requests_ptr, table_stride,
    tokens, log2_scale,
    query_token_stride, query_head_stride, key_token_stride, key_head_stride,
    value_token_stride, value_head_stride, out_token_stride, out_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, PAGED: tl.constexpr, ONE_QUERY: tl.constexpr,
    WITH_LSE: tl.constexpr,
):  # fmt: skip
    """Program (row block, key head, sequence): all chunks of its rows in increasing order."""
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2)
    query_start, queries, key_start, keys = _extent(
        sequence, query_starts_ptr, key_starts_ptr, key_lengths_ptr, PAGED, ONE_QUERY
    )
    # The blocks with the most keys start first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    if first_row < queries * GROUP:
        row = first_row + tl.arange(0, ROWS)
        number = row // GROUP
        head = kv_head * GROUP + row % GROUP
        token = (query_start + number).to(tl.int64)
        column = tl.arange(0, COLUMNS)
        inside = (number < queries)[:, None] & (column < HEAD_DIM)[None, :]
        # A sequence's queries are its last keys: a cached prefix comes first.
        before = keys - queries
        position = number + before
        q = tl.load(
            query_ptr + (token * query_token_stride + head * query_head_stride)[:, None]
            + column[None, :],
            mask=inside, other=0.0,
        )  # fmt: skip
        slot_ptr = _slots(sequence, table_ptr, requests_ptr, table_stride, PAGED)
        k_ptr = key_ptr + kv_head * key_head_stride
        v_ptr = value_ptr + kv_head * value_head_stride
        last = tl.minimum((first_row + ROWS - 1) // GROUP, queries - 1) + before
        whole = (first_row // GROUP + before + 1) // BLOCK
        blocks = last // BLOCK + 1
        largest, _, values = no_keys(ROWS, COLUMNS)
        total = tl.zeros((ROWS,), tl.float32)
        chunk_largest, chunk_total, chunk_values = no_keys(ROWS, COLUMNS)
        for block in range(whole):
            chunk_largest, chunk_total, chunk_values = visit_block(
                q, chunk_largest, chunk_total, chunk_values, k_ptr, v_ptr, slot_ptr, key_start,
                block, position, keys, log2_scale, key_token_stride, value_token_stride,
                HEAD_DIM, COLUMNS, BLOCK, PAGED, False,
            )  # fmt: skip
            if block % CHUNK == CHUNK - 1:
                largest, total, values = add_chunk(
                    largest, total, values,
                    chunk_largest, tl.max(chunk_total, axis=1), chunk_values,
                )  # fmt: skip
                chunk_largest, chunk_total, chunk_values = no_keys(ROWS, COLUMNS)
        for block in range(whole, blocks):
            chunk_largest, chunk_total, chunk_values = visit_block(
                q, chunk_largest, chunk_total, chunk_values, k_ptr, v_ptr, slot_ptr, key_start,
                block, position, keys, log2_scale, key_token_stride, value_token_stride,
                HEAD_DIM, COLUMNS, BLOCK, PAGED, True,
            )  # fmt: skip
            if block % CHUNK == CHUNK - 1:
                largest, total, values = add_chunk(
                    largest, total, values,
                    chunk_largest, tl.max(chunk_total, axis=1), chunk_values,
                )  # fmt: skip
                chunk_largest, chunk_total, chunk_values = no_keys(ROWS, COLUMNS)
        # Empty, and so without effect, where a chunk has just ended.
        largest, total, values = add_chunk(
            largest, total, values, chunk_largest, tl.max(chunk_total, axis=1), chunk_values
        )
        out, lse = finish(largest, total, values)
        target = out_ptr + (token * out_token_stride + head * out_head_stride)[:, None]
        tl.store(target + column[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
        if WITH_LSE:
            tl.store(lse_ptr + head * tokens + token, lse, mask=number < queries)


@triton.jit(do_not_specialize=["chunk_bound", "table_stride"])
def chunk_kernel(
    query_ptr, key_ptr, value_ptr, parts_ptr, sums_ptr,
    key_starts_ptr, key_lengths_ptr, table_ptr, requests_ptr, table_stride,
    chunk_bound, log2_scale,
    query_token_stride, query_head_stride, key_token_stride, key_head_stride,
    value_token_stride, value_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Program (share of the chunks, key head, sequence) of a decode step: each chunk by itself.

    parts: [sequences, heads, chunk_bound, HEAD_DIM] fp32; sums: [sequences, heads, chunk_bound, 2]
    fp32, maximum and sum of the weights.
    """
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2)
    _, _, key_start, keys = _extent(sequence, None, key_starts_ptr, key_lengths_ptr, PAGED, True)
    blocks = (keys + BLOCK - 1) // BLOCK
    chunks = (blocks + CHUNK - 1) // CHUNK
    if tl.program_id(0) < chunks:
        row = tl.arange(0, ROWS)
        head = kv_head * GROUP + row
        column = tl.arange(0, COLUMNS)
        inside = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
        q = tl.load(
            query_ptr + sequence.to(tl.int64) * query_token_stride
            + head[:, None] * query_head_stride + column[None, :],
            mask=inside, other=0.0,
        )  # fmt: skip
        position = tl.zeros((ROWS,), tl.int32) + (keys - 1)
        slot_ptr = _slots(sequence, table_ptr, requests_ptr, table_stride, PAGED)
        k_ptr = key_ptr + kv_head * key_head_stride
        v_ptr = value_ptr + kv_head * value_head_stride
        for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
            largest, total, values = no_keys(ROWS, COLUMNS)
            for block in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, blocks)):
                largest, total, values = visit_block(
                    q, largest, total, values, k_ptr, v_ptr, slot_ptr, key_start,
                    block, position, keys, log2_scale, key_token_stride, value_token_stride,
                    HEAD_DIM, COLUMNS, BLOCK, PAGED, True,
                )  # fmt: skip
            heads = tl.num_programs(1) * GROUP
            place = (sequence.to(tl.int64) * heads + head) * chunk_bound + chunk
            tl.store(parts_ptr + place[:, None] * HEAD_DIM + column[None, :], values, mask=inside)
            tl.store(sums_ptr + place * 2, largest, mask=row < GROUP)
            tl.store(sums_ptr + place * 2 + 1, tl.max(total, axis=1), mask=row < GROUP)


@triton.jit(do_not_specialize=["chunk_bound"])
def combine_kernel(
    parts_ptr, sums_ptr, out_ptr, lse_ptr, key_starts_ptr, key_lengths_ptr, chunk_bound,
    out_token_stride, out_head_stride,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    PAGED: tl.constexpr, WITH_LSE: tl.constexpr,
):  # fmt: skip
    """Program (head, sequence): the chunks of `chunk_kernel`, added in increasing order."""
    head = tl.program_id(0).to(tl.int64)
    sequence = tl.program_id(1)
    _, _, _, keys = _extent(sequence, None, key_starts_ptr, key_lengths_ptr, PAGED, True)
    chunks = (keys + BLOCK * CHUNK - 1) // (BLOCK * CHUNK)
    column = tl.arange(0, COLUMNS)
    one = tl.arange(0, 1)
    heads = tl.num_programs(0)
    base = (sequence.to(tl.int64) * heads + head) * chunk_bound + one
    largest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    values = tl.zeros((1, COLUMNS), tl.float32)
    for chunk in range(chunks):
        place = base + chunk
        part = tl.load(
            parts_ptr + place[:, None] * HEAD_DIM + column[None, :],
            mask=(column < HEAD_DIM)[None, :], other=0.0,
        )  # fmt: skip
        largest, total, values = add_chunk(
            largest, total, values,
            tl.load(sums_ptr + place * 2), tl.load(sums_ptr + place * 2 + 1), part,
        )  # fmt: skip
    out, lse = finish(largest, total, values)
    target = out_ptr + sequence.to(tl.int64) * out_token_stride + head * out_head_stride
    tl.store(
        target + column[None, :], out.to(out_ptr.dtype.element_ty),
        mask=(column < HEAD_DIM)[None, :],
    )  # fmt: skip
    if WITH_LSE:
        tl.store(lse_ptr + head * tl.num_programs(1) + sequence + one, lse)


@dataclass(frozen=True, slots=True)
class PackedKeys:
    """Keys and values packed by sequence; starts: [sequences + 1] int, on the device."""

    starts: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """Keys and values in a cache, pages of one key.

    lengths, requests: [sequences] int, the keys of each sequence and its row in `table`
    [rows, longest] int32, whose entries are cache slots. All on the device.
    """

    lengths: torch.Tensor
    table: torch.Tensor
    requests: torch.Tensor


@functools.cache
def _gpu(device: int | None) -> tuple[int, int]:
    """(processors, bytes of shared memory that a program may take) of a GPU; of an H200 where
    there is none, in Triton's interpreter."""
    if device is None:
        return 132, 232448
    properties = triton.runtime.driver.active.utils.get_device_properties(device)
    return properties["multiprocessor_count"], properties["max_shared_mem"]


# Rows ascending; measured on an H200. The last is for heads of 65 to 128 columns alone.
TILES: Final = (AttentionTile(16, 2, 3), AttentionTile(64, 4, 2), AttentionTile(128, 8, 3))
# The ones that the weights are multiplied by, and sums between warps.
_OTHER_SHARED: Final = 2560


def choose_tile(rows: int, columns: int, shared_bytes: int) -> AttentionTile:
    """The first tile that holds the rows, or the last; with fewer stages, or a lower one, where a
    processor's shared memory does not hold it. `ValueError` where none fits."""
    tiles = [tile for tile in TILES if tile.rows <= 64 or 64 < columns <= 128]
    wanted = next((i for i, tile in enumerate(tiles) if rows <= tile.rows), len(tiles) - 1)
    for tile in reversed(tiles[: wanted + 1]):
        for stages in range(tile.stages, 0, -1):
            used = 2 * columns * (tile.rows + 2 * stages * BLOCK_KEYS) + _OTHER_SHARED
            # Without a stage ahead a lower tile is better, where there is one.
            if used <= shared_bytes and (stages > 1 or tile is tiles[0]):
                return replace(tile, stages=stages)
    raise ValueError(
        f"attention: {columns} columns of head_dim need {used} bytes of shared memory, this GPU's "
        f"processors have {shared_bytes}"
    )


def launch_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: PackedKeys | PagedKeys,
    *,
    scale: float,
    query_starts: torch.Tensor | None,
    longest_query: int,
    longest_key: int,
    out: torch.Tensor | None = None,
    with_lse: bool = True,
    tile: AttentionTile | None = None,
    programs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out like query, lse [heads, tokens] fp32 or None) of queries that are the last of their
    sequence's keys.

    query, out: [tokens, heads, head_dim]; key, value: [keys or slots, kv_heads, head_dim], last
    dimension contiguous; query_starts: [sequences + 1] int on the device, None for one query a
    sequence. longest_query, longest_key: bounds of the lengths, which alone shape the launch.
    tile, programs (that share a decode step's chunks): for tests and tables.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    lse = query.new_empty((heads, tokens), dtype=torch.float32) if with_lse else None
    if query.numel() == 0:
        return out, lse
    paged = isinstance(keys, PagedKeys)
    lengths = keys.lengths if isinstance(keys, PagedKeys) else None
    table = keys.table if isinstance(keys, PagedKeys) else None
    requests = keys.requests if isinstance(keys, PagedKeys) else None
    key_starts = None if isinstance(keys, PagedKeys) else keys.starts
    sequences = keys.lengths.shape[0] if isinstance(keys, PagedKeys) else keys.starts.shape[0] - 1
    columns = max(16, triton.next_power_of_2(head_dim))
    table_stride = 0 if table is None else table.stride(0)
    shape = {"HEAD_DIM": head_dim, "COLUMNS": columns, "BLOCK": BLOCK_KEYS, "CHUNK": CHUNK_BLOCKS}
    one_query = query_starts is None
    processors, shared_bytes = _gpu(query.device.index if query.is_cuda else None)
    chunks = triton.cdiv(longest_key, BLOCK_KEYS * CHUNK_BLOCKS)
    if programs is None:
        programs = _share(sequences * kv_heads, chunks, processors) if one_query else 1
    if one_query and programs > 1:
        tile = tile or choose_tile(1, columns, shared_bytes)
        tile = replace(tile, rows=max(16, triton.next_power_of_2(group)))
        parts = query.new_empty((sequences, heads, chunks, head_dim), dtype=torch.float32)
        sums = query.new_empty((sequences, heads, chunks, 2), dtype=torch.float32)
        launch(
            chunk_kernel,
            (programs, kv_heads, sequences),
            (
                query, key, value, parts, sums,
                key_starts, lengths, table, requests, table_stride, chunks, scale * _LOG2E,
                *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
            ),
            {"GROUP": group, "ROWS": tile.rows, "PAGED": paged, **shape, **_options(tile)},
        )  # fmt: skip
        launch(
            combine_kernel,
            (heads, sequences),
            (parts, sums, out, lse, key_starts, lengths, chunks, *out.stride()[:2]),
            {"PAGED": paged, "WITH_LSE": with_lse, **shape, "num_warps": 1, **UNFUSED},
        )
        return out, lse
    rows = longest_query * group
    tile = tile or choose_tile(rows, columns, shared_bytes)
    launch(
        attention_kernel,
        (triton.cdiv(rows, tile.rows), kv_heads, sequences),
        (
            query, key, value, out, lse, query_starts, key_starts, lengths, table, requests,
            table_stride, tokens, scale * _LOG2E,
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *out.stride()[:2],
        ),
        {"GROUP": group, "ROWS": tile.rows, "PAGED": paged, "ONE_QUERY": one_query}
        | {"WITH_LSE": with_lse, **shape, **_options(tile)},
    )  # fmt: skip
    return out, lse


def _options(tile: AttentionTile) -> dict[str, Any]:
    return {"num_warps": tile.warps, "num_stages": tile.stages, **UNFUSED}


def _share(work: int, chunks: int, processors: int) -> int:
    """Programs that share the chunks of one sequence and key head in a decode step: enough to
    fill the GPU; one, which needs no second launch, where the batch fills it."""
    return 1 if work >= 2 * processors else min(chunks, triton.cdiv(4 * processors, work))
