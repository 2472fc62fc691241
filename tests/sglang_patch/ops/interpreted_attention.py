"""The Triton attention in Triton's interpreter: its written order, and that nothing else sets bits.

Not collected by name: `test_kernels_interpreted.py` runs this file with TRITON_INTERPRET=1. The
interpreter's product adds over increasing k (`bf16_interpreter.py`), so the order of everything
around the products shows bit for bit.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_kernels_interpreted.py"

import bf16_interpreter

from miles_launcher.conformance.bits import differing, one_ulp, random
from sglang_patch.hooks.attention import triton_decode, triton_extend
from sglang_patch.ops.attention import kernel_triton, reference
from sglang_patch.ops.attention.blocks import BLOCK_KEYS, CHUNK_BLOCKS
from sglang_patch.ops.attention.kernel import launch_attention
from sglang_patch.ops.attention.kernel_triton import (
    AttentionTile,
    PackedKeys,
    PagedKeys,
    launch_keys,
)

bf16_interpreter.install()
FP32 = torch.float32
SMALL, TALL = AttentionTile(16, 4, 1), AttentionTile(64, 4, 1)
LENGTHS = (1, 64, 65, 258)
LOG2E = 1.4426950408889634


def starts(lengths: Any) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def operands(
    lengths: tuple[int, ...] = LENGTHS, heads: int = 2, kv_heads: int = 1, head_dim: int = 16
) -> list[torch.Tensor]:
    tokens = sum(lengths)
    # Spread scores, so that the maximum moves from block to block.
    query = random(tokens, heads, head_dim, seed=40, scale=2.0)
    return [query, *(random(tokens, kv_heads, head_dim, seed=n) for n in (41, 42))]


def prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Any,
    keys: Any = None,
    tile: AttentionTile = TALL,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    keys = lengths if keys is None else keys
    return launch_keys(
        query,
        key,
        value,
        PackedKeys(starts(keys)),
        scale=0.3,
        query_starts=starts(lengths),
        longest_query=max(lengths),
        longest_key=max(keys),
        tile=tile,
    )


# --- the order --------------------------------------------------------------------------------


def product(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], c: np.ndarray[Any, Any]) -> Any:
    for k in range(a.shape[1]):
        c = c + a[:, k : k + 1] * b[k : k + 1]
    return c


def written_order(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chunk_blocks: int = CHUNK_BLOCKS
) -> tuple[torch.Tensor, float]:
    """One query of one head [dim] over its keys [keys, dim], as docs/parity.md has it."""
    q, k, v = (t.float().numpy() for t in (query, key, value))
    scale, zero = np.float32(0.3 * LOG2E), np.float32(0)
    largest, total, values = np.float32(-np.inf), zero, np.zeros_like(v[0])
    for first in range(0, len(k), BLOCK_KEYS * chunk_blocks):
        m, t, a = np.float32(-np.inf), zero, np.zeros_like(v[0])
        for start in range(first, min(first + BLOCK_KEYS * chunk_blocks, len(k)), BLOCK_KEYS):
            ks, vs = (x[start : start + BLOCK_KEYS] for x in (k, v))
            scores = product(q[None], ks.T, np.zeros((1, len(ks)), np.float32))[0]
            new = max(m, scores.max() * scale)
            weights = torch.from_numpy(np.exp2(scores * scale + -new))
            w = weights.to(torch.bfloat16).float().numpy()[None]
            old = np.exp2(m - new)
            t = product(w, np.ones((len(ks), 1), np.float32), np.full((1, 1), t * old))[0, 0]
            a = product(w, vs, (a * old)[None])[0]
            m = new
        new = max(largest, m)
        old, mine = np.exp2(largest - new), np.exp2(m - new)
        total = t * mine + total * old
        values = a * mine + values * old
        largest = new
    out = torch.from_numpy(values * (np.float32(1) / total) + zero)
    return out.to(torch.bfloat16), float((largest + np.log2(total)) * np.float32(np.log(2)))


def test_the_written_order() -> None:
    query, key, value = operands((330,))
    out, lse = prefill(query, key, value, (330,))
    assert lse is not None
    for token in (0, 1, 63, 64, 65, 255, 256, 257, 329):
        seen = slice(0, token + 1)
        for head in range(2):
            row, mine = written_order(query[token, head], key[seen, 0], value[seen, 0])
            assert differing(out[token, head], row) == 0, (token, head)
            assert abs(float(lse[head, token]) - mine) < 1e-5
    one_chunk = torch.stack(
        [
            written_order(query[t, 0], key[: t + 1, 0], value[: t + 1, 0], 16)[0]
            for t in range(250, 330)
        ]
    )
    assert differing(one_chunk[:6], out[250:256, 0]) == 0
    assert differing(one_chunk[6:], out[256:, 0]) > 0, "these inputs must show where a chunk ends"


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (2, 2, 24), (3, 1, 40)])
def test_near_the_reference(heads: int, kv_heads: int, head_dim: int) -> None:
    queries, keys = [3, 66], [7, 66]
    query = random(sum(queries), heads, head_dim, seed=22)
    key, value = (random(sum(keys), kv_heads, head_dim, seed=n) for n in (23, 24))
    out, _ = launch_attention(query, key, value, queries, keys, 0.2)
    expected = reference.attention(query, key, value, queries, keys, 0.2)
    assert (out.float() - expected.float()).abs().max() < 0.02


# --- what sets no bit -------------------------------------------------------------------------


def test_tiles_phases_and_shares_of_a_decode_step() -> None:
    query, key, value = operands(heads=3)
    out, lse = prefill(query, key, value, LENGTHS)
    assert lse is not None
    for tile in (SMALL, AttentionTile(128, 8, 1)):
        again = prefill(query, key, value, LENGTHS, tile=tile)
        assert differing(again[0], out) == 0 and differing(again[1], lse) == 0
    ends = starts(LENGTHS)[1:].tolist()
    last = [end - 1 for end in ends]
    for programs in (1, 2, 3):
        step, log_sum = launch_keys(
            query[last],
            key,
            value,
            PackedKeys(starts(LENGTHS)),
            scale=0.3,
            query_starts=None,
            longest_query=1,
            longest_key=max(LENGTHS),
            programs=programs,
        )
        assert differing(step, out[last]) == 0 and differing(log_sum, lse[:, last]) == 0
        assert differing(one_ulp(step), out[last]) == 1
    for end, length in zip(ends, LENGTHS, strict=True):
        mine, half = slice(end - length, end), (length + 1) // 2
        chunk = slice(end - half, end)
        part, _ = prefill(query[chunk], key[mine], value[mine], [half], [length], SMALL)
        assert differing(part, out[chunk]) == 0
        fewer = slice(end - length + 1, end)
        if length > 1:
            other, _ = prefill(query[chunk], key[fewer], value[fewer], [half], [length - 1], SMALL)
            assert differing(other, out[chunk]) > 0, "one key less must show"


def test_heads_are_independent_of_the_number_of_heads() -> None:
    """What Ulysses and tensor parallelism cut: whole groups, and one head of a group."""
    query, key, value = operands((5, 130), heads=8, kv_heads=4)
    out, _ = prefill(query, key, value, (5, 130))
    for kv_head in range(4):
        mine = slice(2 * kv_head, 2 * kv_head + 2)
        one = [t[:, kv_head : kv_head + 1].contiguous() for t in (key, value)]
        assert differing(prefill(query[:, mine], *one, (5, 130))[0], out[:, mine]) == 0
        alone, _ = prefill(query[:, 2 * kv_head : 2 * kv_head + 1], *one, (5, 130), tile=SMALL)
        assert differing(alone, out[:, 2 * kv_head : 2 * kv_head + 1]) == 0


# --- the cache --------------------------------------------------------------------------------


class Cache:
    """The keys and values of LENGTHS in shuffled slots among other requests' numbers."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        count, spare = key.shape[0], 50
        generator = torch.Generator().manual_seed(43)
        slots = torch.randperm(count + spare, generator=generator)[:count]
        self.keys, self.values = (random(count + spare, *key.shape[1:], seed=n) for n in (44, 45))
        self.keys[slots], self.values[slots] = key, value
        self.requests = torch.tensor([6, 2, 9, 0])
        self.table = torch.full((11, 288), 7, dtype=torch.int32)
        for request, start, length in zip(
            self.requests.tolist(), starts(LENGTHS).tolist(), LENGTHS, strict=False
        ):
            self.table[request, :length] = slots[start : start + length].int()
        self.lengths = torch.tensor(LENGTHS)
        self.slots = slots


def test_pages_of_one_key_are_packed_keys() -> None:
    query, key, value = operands()
    out, _ = prefill(query, key, value, LENGTHS)
    cache = Cache(key, value)
    keys = PagedKeys(cache.lengths, cache.table, cache.requests)
    last = (starts(LENGTHS)[1:] - 1).tolist()
    for programs in (1, 2, 5):
        step, none = launch_keys(
            query[last],
            cache.keys,
            cache.values,
            keys,
            scale=0.3,
            query_starts=None,
            longest_query=1,
            longest_key=288,
            with_lse=False,
            programs=programs,
        )
        assert none is None and differing(step, out[last]) == 0
    cache.table[cache.requests[-1], 0] = cache.table[cache.requests[-1], 1]
    spoiled, _ = launch_keys(
        query,
        cache.keys,
        cache.values,
        keys,
        scale=0.3,
        query_starts=starts(LENGTHS),
        longest_query=258,
        longest_key=288,
    )
    first = sum(LENGTHS[:-1])
    assert differing(spoiled[:first], out[:first]) == 0
    assert differing(spoiled[first:], out[first:]) > 0, "a wrong slot must show"


def engine(cache: Cache, starts_: torch.Tensor | None, longest: int) -> tuple[Any, Any, Any]:
    """The parts of the engine that the hooks read: backend, layer, batch."""
    pool = SimpleNamespace(
        get_key_buffer=lambda layer: cache.keys, get_value_buffer=lambda layer: cache.values
    )

    def write(batch: Any, layer: Any, place: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        cache.keys[place.loc], cache.values[place.loc] = k, v

    backend = SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token=cache.table,
        max_context_len=288,
        _translate_kv_loc=None,
        _set_kv_buffer=write,
        forward_metadata=SimpleNamespace(
            custom_mask=None, qo_indptr=starts_, max_extend_len=longest
        ),
    )
    layer = SimpleNamespace(
        layer_id=3,
        tp_q_head_num=2,
        qk_head_dim=16,
        v_head_dim=16,
        scaling=0.3,
        logit_cap=0.0,
        k_scale=None,
        sliding_window_size=-1,
        is_cross_attention=False,
    )
    batch = SimpleNamespace(
        batch_size=len(LENGTHS),
        seq_lens=cache.lengths,
        req_pool_indices=cache.requests,
        out_cache_loc=cache.slots[(starts(LENGTHS)[1:] - 1).long()],
    )
    return backend, layer, batch


def never(*_: Any) -> None:
    raise AssertionError("the engine's own kernel ran")


def test_the_hooks_read_the_engines_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = operands()
    out, _ = prefill(query, key, value, LENGTHS)
    launches: list[int] = []
    original = kernel_triton.launch_keys

    def counted(*arguments: Any, **keywords: Any) -> Any:
        launches.append(keywords["longest_query"])
        return original(*arguments, **keywords)

    monkeypatch.setattr(kernel_triton, "launch_keys", counted)
    pools = SimpleNamespace(KVWriteLoc=lambda loc, swa: SimpleNamespace(loc=loc))
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.memory_pool", pools)
    cache = Cache(key, value)
    backend, layer, batch = engine(cache, starts(LENGTHS), 258)
    flat = torch.empty(query.shape[0], 32, dtype=query.dtype)
    found = triton_extend(never, backend, query.flatten(1), flat, layer, batch, True, 0.0, None)
    assert found is flat and differing(found.view_as(out), out) == 0
    # The newest key and value are not yet in the cache when a decode step begins.
    last = (starts(LENGTHS)[1:] - 1).tolist()
    cache.keys[batch.out_cache_loc] = cache.values[batch.out_cache_loc] = 0
    step = triton_decode(
        never, backend, query[last].flatten(1), key[last], value[last], layer, batch
    )
    assert differing(step.view(len(last), 2, 16), out[last]) == 0
    assert launches == [258, 1]
    layer.sliding_window_size, layer.logit_cap = 128, 30.0
    with pytest.raises(ValueError, match=r"layer 3: .*sliding_window_size=128, logit_cap=30"):
        triton_decode(never, backend, query[last].flatten(1), None, None, layer, batch, False)
