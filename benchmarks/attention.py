"""The attention's Triton path against FlashAttention, on the GPU present.

    PYTHONPATH=. python3 -m benchmarks.attention out.json

Prefill and backward against PyTorch's FlashAttention 2 over the same packed sequences; decode,
which reads pages of one key, against PyTorch's over contiguous keys. Where `sgl_kernel` is there,
FA3 with one split over the same pages is timed beside them. Bits come first: a decode step and a
sequence alone must have those of the batch's prefill, and a backward its own. Exit code 1 when one
has not, 2 without a GPU. `--compile I N` compiles every N-th case, to be run N at a time before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.product_timing import _PEAKS, _environment, _time
from megatron_patch.autograd.attention import flash_backward
from miles_launcher.conformance.bits import differing
from sglang_patch.ops.attention.kernel_triton import PackedKeys, PagedKeys, launch_keys

Calls = dict[str, Callable[[], Any]]
# As wide as a model's table of slots: it bounds the programs of a decode step.
_CONTEXT: Final = 8192
_CACHE_BYTES: Final = 120e6


@dataclass(frozen=True, slots=True)
class Case:
    """`sequences` of `keys` keys each; in decode one query a sequence."""

    kind: str
    sequences: int
    keys: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


def cases() -> list[Case]:
    """Qwen3-4B's heads, and as many of 64."""
    found = []
    for head_dim in (128, 64):
        shape = {"head_dim": head_dim}
        for kind in ("prefill", "backward"):
            found += [Case(kind, n, k, **shape) for n, k in ((1, 2048), (1, 8192), (16, 512))]
        found += [Case("decode", n, k, **shape) for k in (512, 4096) for n in (1, 16, 64)]
    return found


def _normal(*size: int) -> torch.Tensor:
    return torch.randn(size, device="cuda").bfloat16()


def _starts(case: Case) -> torch.Tensor:
    lengths = [case.keys] * case.sequences
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device="cuda")


def _flash3() -> Any:
    try:
        from sgl_kernel import flash_attn
    except ImportError:
        return None
    return flash_attn


def _packed(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    one = q.shape[0] == starts.shape[0] - 1
    return launch_keys(
        q,
        k,
        v,
        PackedKeys(starts),
        scale=case.scale,
        query_starts=None if one else starts,
        longest_query=1 if one else case.keys,
        longest_key=case.keys,
    )


def _prefill(case: Case) -> tuple[int, Calls]:
    tokens, starts = case.sequences * case.keys, _starts(case)
    q = _normal(tokens, case.heads, case.head_dim)
    k, v = (_normal(tokens, case.kv_heads, case.head_dim) for _ in range(2))
    out, _ = _packed(case, q, k, v, starts)
    last = (starts[1:] - 1).long()
    wrong = differing(_packed(case, q[last], k, v, starts)[0], out[last])
    first = slice(0, case.keys)
    wrong += differing(_packed(case, q[first], k[first], v[first], starts[:2])[0], out[first])
    calls: Calls = {
        "ours": lambda: _packed(case, q, k, v, starts),
        "torch_flash": lambda: torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, case.keys, case.keys, 0.0, True, False, scale=case.scale
        ),
    }
    if flash3 := _flash3():
        calls["fa3"] = lambda: flash3.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=case.keys,
            max_seqlen_k=case.keys,
            softmax_scale=case.scale,
            causal=True,
            num_splits=1,
            return_softmax_lse=True,
        )
    return wrong, calls


def _backward(case: Case) -> tuple[int, Calls]:
    tokens, starts = case.sequences * case.keys, _starts(case)
    q, gradient = (_normal(tokens, case.heads, case.head_dim) for _ in range(2))
    k, v = (_normal(tokens, case.kv_heads, case.head_dim) for _ in range(2))
    out, lse = _packed(case, q, k, v, starts)
    assert lse is not None
    saved = (q, k, v, out, lse)

    def deterministic() -> tuple[torch.Tensor, ...]:
        return flash_backward(gradient, *saved, starts, case.keys, case.scale)

    no_rng = torch.zeros(2, dtype=torch.uint64, device="cuda")
    again = [deterministic() for _ in range(3)]
    wrong = sum(
        differing(a, b) for other in again[1:] for a, b in zip(other, again[0], strict=True)
    )
    return wrong, {
        "ours": deterministic,
        "torch_flash": lambda: torch.ops.aten._flash_attention_backward(
            gradient,
            *saved,
            starts,
            starts,
            case.keys,
            case.keys,
            0.0,
            True,
            no_rng,
            no_rng.new_empty(0),
            scale=case.scale,
        ),
    }


def _decode(case: Case) -> tuple[int, Calls]:
    """One call reads several batches of keys in turn, more than the L2 cache holds."""
    n, keys, width = case.sequences, case.keys, case.kv_heads * case.head_dim
    batches = int(max(1, min(6, _CACHE_BYTES // (n * keys * width * 4) + 1)))
    total = batches * n * keys
    q = _normal(n, case.heads, case.head_dim)
    k, v = (_normal(total, case.kv_heads, case.head_dim) for _ in range(2))
    slots = torch.randperm(total, device="cuda").int().view(batches, n, keys)
    tables = torch.zeros(batches, n, _CONTEXT, dtype=torch.int32, device="cuda")
    tables[:, :, :keys] = slots
    lengths = torch.full((n,), keys, device="cuda")
    requests, out = torch.arange(n, device="cuda"), torch.empty_like(q)

    def ours(table: torch.Tensor) -> torch.Tensor:
        launch_keys(
            q,
            k,
            v,
            PagedKeys(lengths, table, requests),
            scale=case.scale,
            query_starts=None,
            longest_query=1,
            longest_key=_CONTEXT,
            out=out,
            with_lse=False,
        )
        return out

    chosen = slots[0].flatten().long()
    long_query = _normal(n * keys, case.heads, case.head_dim)
    long_query[keys - 1 :: keys] = q
    prefill, _ = _packed(case, long_query, k[chosen], v[chosen], _starts(case))
    wrong = differing(ours(tables[0]), prefill[keys - 1 :: keys])
    del long_query, prefill
    whole = [t[: batches * n * keys].view(batches, n, keys, -1, case.head_dim) for t in (k, v)]
    contiguous = [t.transpose(2, 3) for t in whole]

    def torch_flash() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for a, b in zip(*contiguous, strict=True):
                F.scaled_dot_product_attention(
                    q.unsqueeze(2), a, b, scale=case.scale, enable_gqa=True
                )

    calls: Calls = {"ours": lambda: [ours(t) for t in tables], "torch_flash": torch_flash}
    if flash3 := _flash3():
        counts = torch.arange(n + 1, dtype=torch.int32, device="cuda")
        short = lengths.int()
        calls["fa3"] = lambda: [
            flash3.flash_attn_with_kvcache(
                q,
                k.unsqueeze(1),
                v.unsqueeze(1),
                cache_seqlens=short,
                page_table=t,
                cu_seqlens_q=counts,
                max_seqlen_q=1,
                softmax_scale=case.scale,
                causal=True,
                num_splits=1,
            )
            for t in tables
        ]
    return wrong, {name: _each(call, batches) for name, call in calls.items()}


def _each(call: Callable[[], Any], batches: int) -> Callable[[], Any]:
    """The same call; how many batches it reads goes with it."""

    def run() -> Any:
        return call()

    run.batches = batches  # type: ignore[attr-defined]
    return run


_KINDS: Final[Mapping[str, Callable[[Case], tuple[int, Calls]]]] = {
    "prefill": _prefill,
    "backward": _backward,
    "decode": _decode,
}


def floor(case: Case) -> float | None:
    """Microseconds that the arithmetic or the bytes need at the datasheet's rates."""
    peaks = _PEAKS.get(torch.cuda.get_device_name(0))
    if peaks is None:
        return None
    if case.kind == "decode":
        moved = 4 * case.sequences * case.keys * case.kv_heads * case.head_dim
        return round(moved / peaks[0] * 1e6, 2)
    products = {"prefill": 2, "backward": 5}[case.kind]
    flops = products * case.sequences * case.keys**2 * case.heads * case.head_dim
    return round(flops / peaks[1] * 1e6, 2)


def measure(case: Case) -> dict[str, Any]:
    """One row of the report."""
    torch.manual_seed(case.keys + case.sequences)
    wrong, calls = _KINDS[case.kind](case)
    row: dict[str, Any] = {**asdict(case), "differing": wrong}
    if wrong:
        return row
    batches = getattr(calls["ours"], "batches", 1)
    times = {name: round(value / batches, 2) for name, value in _time(calls).items()}
    row |= {f"{name}_us": value for name, value in times.items()}
    row["ratio"] = round(times["ours"] / times["torch_flash"], 3)
    if "fa3" in times:
        row["over_fa3"] = round(times["ours"] / times["fa3"], 3)
    row["floor_us"] = floor(case)
    return row


def main(arguments: list[str]) -> int:
    """See the module."""
    if not torch.cuda.is_available():
        print("no GPU here", file=sys.stderr)
        return 2
    if arguments[:1] == ["--compile"]:
        for case in cases()[int(arguments[1]) :: int(arguments[2])]:
            _KINDS[case.kind](case)
        torch.cuda.synchronize()
        return 0
    path, rows = Path(arguments[0]), []
    for case in cases():
        row = measure(case)
        rows.append(row)
        path.write_text(json.dumps({**_environment(), "rows": rows}, indent=1) + "\n")
        print(
            f"{case.kind:8} {case.sequences:3} x {case.keys:5}, heads of {case.head_dim:3}: "
            f"{row.get('ratio', 'other bits')} of torch, {row.get('over_fa3', '-')} of FA3, "
            f"{row.get('ours_us')} us (floor {row.get('floor_us')})",
            flush=True,
        )
    return 1 if any(row["differing"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
