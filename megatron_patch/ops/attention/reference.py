"""Causal attention over packed sequences in plain PyTorch: what runs on a CPU.

Sums over head_dim and over keys run in increasing order from zero; a masked key contributes an
exact zero, so a query's bits depend on its own keys alone, not on the batch, the chunk, or on how
many of its keys came from a cache.
"""

from __future__ import annotations

import torch

from ..elementary import exp, pair_sum
from ..formats import accumulator_dtype

# Score elements held at a time; bounds memory without touching a bit.
_BLOCK_ELEMENTS = 1 << 21


def _padded(x: torch.Tensor, lengths: list[int], longest: int) -> torch.Tensor:
    """[tokens, heads, dim] packed -> [sequences, heads, longest, dim], zeros at the end."""
    out = x.new_zeros((len(lengths), longest, *x.shape[1:]))
    start = 0
    for i, length in enumerate(lengths):
        out[i, :length] = x[start : start + length]
        start += length
    return out.transpose(1, 2)


def _block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [B, KV, G, Q, D], k and v [B, KV, S, D], visible [B, Q, S] bool -> [B, KV, G, Q, D]."""
    keys = k.unsqueeze(2).transpose(-1, -2)
    scores = torch.zeros((*q.shape[:-1], k.shape[-2]), dtype=q.dtype, device=q.device)
    product = torch.empty_like(scores)
    for d in range(q.shape[-1]):
        torch.mul(q[..., d : d + 1], keys[..., d : d + 1, :], out=product)
        scores.add_(product)
    scores.mul_(scale).masked_fill_(~visible[:, None, None], float("-inf"))
    largest = scores.amax(dim=-1, keepdim=True)
    # A row of padding sees nothing; its maximum must not make exp(-inf - -inf).
    weights = exp(scores - largest.masked_fill(largest == float("-inf"), 0.0))
    total = pair_sum(weights).unsqueeze(-1)
    out = torch.zeros_like(q)
    values = v.unsqueeze(2)
    product = torch.empty_like(out)
    for j in range(k.shape[-2]):
        torch.mul(weights[..., j : j + 1], values[..., j : j + 1, :], out=product)
        out.add_(product)
    return out / total.masked_fill(total == 0, 1.0)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: list[int],
    key_lengths: list[int],
    scale: float,
) -> torch.Tensor:
    """See `op.attention`."""
    wide = accumulator_dtype(query.dtype)
    tokens, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    longest_q, longest_k = max(query_lengths), max(key_lengths)
    k = _padded(key.to(wide), key_lengths, longest_k)
    v = _padded(value.to(wide), key_lengths, longest_k)
    q = _padded(query.to(wide), query_lengths, longest_q)
    q = q.reshape(len(query_lengths), kv_heads, heads // kv_heads, longest_q, head_dim)
    # Query i of a sequence is its key number (keys - queries + i): a cached prefix comes first.
    offsets = torch.tensor(
        [n - m for m, n in zip(query_lengths, key_lengths, strict=True)], device=query.device
    )
    rows = torch.arange(longest_q, device=query.device)
    columns = torch.arange(longest_k, device=query.device)
    counts = torch.tensor(query_lengths, device=query.device)
    visible = columns <= (rows[None, :, None] + offsets[:, None, None])
    visible &= (rows < counts[:, None])[:, :, None]
    step = max(1, _BLOCK_ELEMENTS // (len(query_lengths) * heads * longest_k))
    blocks = [
        _block(q[:, :, :, i : i + step], k, v, visible[:, i : i + step], scale)
        for i in range(0, longest_q, step)
    ]
    out = torch.cat(blocks, dim=-2).reshape(len(query_lengths), heads, longest_q, head_dim)
    out = out.transpose(1, 2)
    packed = torch.cat([out[i, :length] for i, length in enumerate(query_lengths)])
    assert packed.shape == (tokens, heads, head_dim)
    return packed.to(query.dtype)
