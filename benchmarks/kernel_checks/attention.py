"""Attention: one order for prefill, chunk and decode, and the distance to fp64."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.bitwise import differing, random
from benchmarks.kernel_checks.setting import Setting
from sglang_patch.ops.attention.kernel import launch_flash3, launch_triton

FP32 = torch.float32


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence in fp64, [tokens, heads, dim] -> (out, lse [heads, tokens]), by the formula."""
    q, k, v = (t.cpu().double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    scores = scores.masked_fill(~causal, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def _attention(s: Setting, launch: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> str:
    heads, kv_heads = 4, 2
    lengths = list(s.lengths)
    tokens, worst, worst_lse = sum(lengths), 0.0, 0.0
    for head_dim in s.head_dims:
        scale = head_dim**-0.5
        q = random(tokens, heads, head_dim, seed=22).to(s.device)
        k, v = (random(tokens, kv_heads, head_dim, seed=n).to(s.device) for n in (23, 24))
        out, lse = launch(q, k, v, lengths, lengths, scale)
        assert lse.shape == (heads, tokens) and lse.dtype == FP32, (lse.shape, lse.dtype)
        start = 0
        for length in lengths:
            stop = start + length
            mine = slice(start, stop)
            exact, exact_lse = exact_attention(q[mine], k[mine], v[mine], scale)
            worst = max(worst, float((out[mine].cpu().double() - exact).abs().max()))
            distance = (lse[:, mine].cpu().double() - exact_lse).abs().max()
            worst_lse = max(worst_lse, float(distance))
            for queries in sorted({1, (length + 1) // 2, length}):
                last = slice(stop - queries, stop)
                part, part_lse = launch(q[last], k[mine], v[mine], [queries], [length], scale)
                label = f"head_dim {head_dim}: last {queries} of {length}"
                assert differing(part, out[last]) == 0, label
                assert differing(part_lse, lse[:, last]) == 0, label
            start = stop
        half, _ = launch(q[:, 2:], k[:, 1:], v[:, 1:], lengths, lengths, scale)
        assert differing(half, out[:, 2:]) == 0, f"head_dim {head_dim}: half of the heads"
        # The inverse: keys in another order are the same formula and other bits.
        turned = launch(q[-1:], k[mine].flip(0), v[mine].flip(0), [1], [length], scale)[0]
        assert differing(turned, out[-1:]) > 0, "the order of the keys must show"
    assert worst < 3e-2 and worst_lse < 1e-3, (worst, worst_lse)
    return f"lengths {lengths}, head_dim {s.head_dims}, distance to fp64 {worst:.1e}"


def attention_triton(s: Setting) -> str:
    """The Triton forward: prefill, chunk and decode have the same bits; near fp64."""
    return _attention(s, launch_triton)


def attention_flash3(s: Setting) -> str:
    """FA3: prefill, chunk and decode have the same bits; near fp64."""
    return _attention(s, launch_flash3)
