"""Causal attention over packed sequences: FA3 on Hopper, the Triton path elsewhere.

Either gives a query the same bits in a prefill, in a chunk and in a decode step. The two have
different bits: a run uses one of them, on both sides.
"""

from __future__ import annotations

import functools
from itertools import accumulate

import torch

from ..formats import require
from .kernel_triton import PackedKeys, launch_keys
from .op import check_path, gpu_path


@functools.lru_cache(maxsize=16)
def _cumulative(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


def sequence_starts(lengths: list[int], device: torch.device) -> torch.Tensor:
    """Cumulative sequence starts, [sequences + 1] int32; made once for the layers of a pass."""
    return _cumulative(tuple(lengths), device)


def launch_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: list[int],
    key_lengths: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Triton forward; see `launch_attention`."""
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    one_query = max(query_lengths, default=1) == 1
    out, lse = launch_keys(
        query,
        key,
        value,
        PackedKeys(sequence_starts(key_lengths, query.device)),
        scale=scale,
        query_starts=None if one_query else sequence_starts(query_lengths, query.device),
        longest_query=max(query_lengths, default=1),
        longest_key=max(key_lengths, default=1),
    )
    assert lse is not None
    return out, lse


def _page_table(key_lengths: list[int], device: torch.device) -> torch.Tensor:
    """[sequences, longest] int32: the number of each key among all keys; past the end of a
    sequence any number that exists."""
    starts = sequence_starts(key_lengths, device)[:-1]
    table = starts[:, None] + torch.arange(max(key_lengths), device=device, dtype=torch.int32)
    return table.clamp_max(sum(key_lengths) - 1).to(torch.int32)


def launch_flash3(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: list[int],
    key_lengths: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention-3's forward from SGLang's kernel package, one split; see `launch_attention`.

    Queries that are the last of longer keys (a chunk, a decode step) go through pages of one key,
    as the engine's do. In whole keys FA3 gives a single query other bits than a prefill has
    (measured on an H200 at 300 keys). Heads of 64 have them in pages of one key too, so only heads
    of 128 are taken. Raises `ValueError` on others.

    Upstream: sgl_kernel.flash_attn, `flash_attn_varlen_func` and `flash_attn_with_kvcache`
    (sglang-kernel 0.4.5).
    """
    check_path("fa3", "cuda", (9, 0), query.shape[2])
    from sgl_kernel.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    if query_lengths != key_lengths:
        out, lse = flash_attn_with_kvcache(
            query.contiguous(),
            key.contiguous().unsqueeze(1),
            value.contiguous().unsqueeze(1),
            cache_seqlens=torch.tensor(key_lengths, dtype=torch.int32, device=query.device),
            page_table=_page_table(key_lengths, query.device),
            cu_seqlens_q=sequence_starts(query_lengths, query.device),
            max_seqlen_q=max(query_lengths),
            softmax_scale=scale,
            causal=True,
            num_splits=1,
            return_softmax_lse=True,
        )[:2]
        return out, lse
    out, lse = flash_attn_varlen_func(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        cu_seqlens_q=sequence_starts(query_lengths, query.device),
        cu_seqlens_k=sequence_starts(key_lengths, query.device),
        max_seqlen_q=max(query_lengths),
        max_seqlen_k=max(key_lengths),
        softmax_scale=scale,
        causal=True,
        num_splits=1,
        return_softmax_lse=True,
    )[:2]
    return out, lse


def launch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: list[int],
    key_lengths: list[int],
    scale: float,
    path: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.attention`; returns (out like query, lse [heads, tokens] fp32, natural logarithm).

    path: `fa3` or `triton`, None for `gpu_path`. A missing `sgl_kernel` raises ImportError. Raises
    `ValueError` on another dtype than bf16, and on a path that the GPU or the heads do not have.
    """
    head_dim = query.shape[2]
    require(
        query.dtype == key.dtype == value.dtype == torch.bfloat16,
        f"attention kernel: query {query.dtype}, key {key.dtype}, value {value.dtype} must be "
        "bfloat16 (fp64 gradchecks run on the CPU reference)",
    )
    # Triton's interpreter runs the Triton path on a CPU's tensors.
    capability = torch.cuda.get_device_capability(query.device) if query.is_cuda else (0, 0)
    path = gpu_path(capability, head_dim) if path is None else path
    check_path(path, "cuda", capability, head_dim)
    launch = launch_flash3 if path == "fa3" else launch_triton
    return launch(query, key, value, query_lengths, key_lengths, scale)
