"""Logprobs of Qwen3 heads against plain PyTorch, on the GPU present: time and peak memory.

    PYTHONPATH=. python3 -m benchmarks.logprobs out.json

`ours` is the trainer's head in its default memory; `torch` is torch.mm, float, division,
log_softmax and gather with autograd, of all rows at once; `torch_chunked` the same under
torch.utils.checkpoint, as many rows at a time as the memory holds. Forward, and forward with
backward to the hidden states and the table. `decode` is the engine's log-softmax of whole rows,
replayed from a graph, against division and torch.log_softmax. Exit code 1 when a bit differs from
the unfused definition, or on some rows from the CPU reference: then there is no time; 2 without a
GPU. `--compile I N` fills Triton's cache with every N-th case.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.product_timing import _PEAKS, _environment, _time
from megatron_patch import autograd, ops
from megatron_patch.autograd import HeadSettings
from megatron_patch.ops.log_softmax import reference
from megatron_patch.schema import vocabulary_segments
from miles_launcher.conformance.bits import differing

_VOCABULARY = vocabulary_segments("qwen3_dense_true_on_policy_v2", 151936)
_HIDDEN = {"0.6B": 1024, "4B": 2560}
_ROWS = (64, 2048, 8192)
_DECODE_ROWS = (1, 16, 64)
_MEMORY = 256 << 20
# What plain PyTorch holds a logit at its peak: bf16, three in fp32 and the gradients, on average.
_TORCH_BYTES = 16
# Rows checked against the CPU's reference, and at a time against the unfused definition.
_REFERENCE_ROWS, _UNFUSED_ROWS = 4, 512
_ROUNDS = 3

Call = Callable[[], Any]


class Case:
    """The operands of one head: hidden states and table in bf16, targets, a gradient a row."""

    def __init__(self, rows: int, hidden: int) -> None:
        torch.manual_seed(rows + hidden)
        self.x = torch.randn(rows, hidden, device="cuda").bfloat16().requires_grad_()
        table = torch.randn(_VOCABULARY.padded_size, hidden, device="cuda").mul_(0.05)
        self.table = torch.nn.Parameter(table.bfloat16())
        self.table.main_grad = torch.zeros_like(table)
        self.targets = torch.randint(_VOCABULARY.vocab_size, (rows,), device="cuda")
        self.targets[0] = _VOCABULARY.vocab_size - 1
        self.temperature = torch.tensor(0.7, device="cuda")
        self.gradient = torch.randn(rows, device="cuda")

    def ours(self, entropy: bool = False, memory: int = _MEMORY) -> torch.Tensor:
        settings = HeadSettings(
            vocabulary=_VOCABULARY,
            order="segments",
            out_dtype="float32",
            memory_bytes=memory,
            entropy=entropy,
        )
        out = autograd.head_logprobs(self.x, self.table, self.targets, self.temperature, settings)
        return out[0]

    def _plain(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = torch.mm(x, self.table.t())[:, : _VOCABULARY.vocab_size].float()
        logprobs = torch.log_softmax(logits / self.temperature, dim=-1)
        return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1)

    def torch(self) -> torch.Tensor:
        return self._plain(self.x, self.targets)

    def torch_chunked(self) -> torch.Tensor:
        rows = _MEMORY // (_TORCH_BYTES * _VOCABULARY.padded_size)
        parts = zip(self.x.split(rows), self.targets.split(rows), strict=True)
        if not torch.is_grad_enabled():
            return torch.cat([self._plain(*part) for part in parts])
        whole: Any = checkpoint
        return torch.cat(
            [
                whole(self._plain, *part, use_reentrant=False, preserve_rng_state=False)
                for part in parts
            ]
        )

    def step(self, call: Callable[[], torch.Tensor], backward: bool) -> Call:
        """One forward, or one forward and backward, from no gradients."""

        def run() -> None:
            self.x.grad = self.table.grad = None
            if backward:
                call().backward(self.gradient)
            else:
                with torch.no_grad():
                    call()

        return run

    def differing(self) -> int:
        """Elements of other bits than the unfused definition's, and on some rows the CPU's."""
        with torch.no_grad():
            out = self.ours()
            wrong = 0
            for start in range(0, len(out), _UNFUSED_ROWS):
                some = slice(start, start + _UNFUSED_ROWS)
                logits = ops.linear(self.x[some], self.table, out_dtype="float32")
                scaled = ops.temperature_logits(logits, self.temperature)
                targets = self.targets[some].unsqueeze(1)
                unfused = ops.log_softmax(scaled, _VOCABULARY).gather(1, targets).squeeze(1)
                wrong += differing(out[some], unfused)
            logits = ops.linear(self.x[:_REFERENCE_ROWS], self.table, out_dtype="float32").cpu()
            real = [_VOCABULARY.real_columns(i) for i in range(_VOCABULARY.num_segments)]
            cut = (_VOCABULARY.width, _VOCABULARY.num_segments, real)
            temperature = self.temperature.cpu()
            largest, total = reference.segment_statistics(logits, *cut, temperature)
            targets = self.targets[:_REFERENCE_ROWS].cpu().unsqueeze(1)
            chosen = logits.gather(1, targets).squeeze(1) / temperature
            expected = chosen - reference.combine_segments(largest, total)
            return wrong + differing(out[:_REFERENCE_ROWS].cpu(), expected)


def _peak(run: Call, gradient_bytes: int) -> int:
    """Bytes above what was there before, less the table's gradient where the call makes one."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - gradient_bytes


def _milliseconds(runs: dict[str, Call]) -> dict[str, float]:
    """Median of each, round by round in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(_ROUNDS + 1):
        for name, run in list(runs.items())[:: 1 if turn % 2 else -1]:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize()
            if turn:
                times[name].append(start.elapsed_time(stop))
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def head(model: str, rows: int, backward: bool) -> dict[str, Any]:
    """One row of the report."""
    hidden = _HIDDEN[model]
    case = Case(rows, hidden)
    row: dict[str, Any] = {
        "head": model,
        "what": "forward and backward" if backward else "forward",
        "rows": rows,
        "hidden": hidden,
        "vocabulary": _VOCABULARY.vocab_size,
        "memory_bytes": _MEMORY,
        "differing": case.differing(),
    }
    if row["differing"]:
        return row
    runs = {
        "ours": case.step(case.ours, backward),
        "ours_with_entropy": case.step(lambda: case.ours(entropy=True), backward),
        "ours_1_GiB": case.step(lambda: case.ours(memory=1 << 30), backward),
        "torch": case.step(case.torch, backward),
        "torch_chunked": case.step(case.torch_chunked, backward),
    }
    for name, run in runs.items():
        run()
        case.x.grad = case.table.grad = None
        made = case.table.numel() * 2 if backward and name.startswith("torch") else 0
        row[f"{name}_peak_MiB"] = round(_peak(run, made) / 2**20, 1)
    times = _milliseconds(runs)
    row |= {f"{name}_ms": value for name, value in times.items()}
    row["ratio"] = round(times["ours"] / times["torch"], 3)
    peaks = _PEAKS.get(torch.cuda.get_device_name(0))
    if peaks:
        # One product forward, two backward; the logits made again are not counted.
        products = 3 if backward else 1
        flops = 2 * rows * _VOCABULARY.vocab_size * hidden * products
        row["floor_ms"] = round(flops / peaks[1] * 1e3, 3)
    return row


def decode(rows: int) -> dict[str, Any]:
    """The engine's log-softmax of whole rows at a temperature a request."""
    torch.manual_seed(rows)
    logits = torch.randn(rows, _VOCABULARY.vocab_size, device="cuda").mul_(3)
    temperature = 0.5 + torch.rand(rows, 1, device="cuda")
    out = ops.log_softmax(logits, _VOCABULARY, temperature)
    divided = ops.log_softmax(ops.temperature_logits(logits, temperature), _VOCABULARY)
    wrong = differing(out, divided)
    row: dict[str, Any] = {"head": "any", "what": "decode", "rows": rows, "differing": wrong}
    if wrong:
        return row
    times = _time(
        {
            "ours": lambda: ops.log_softmax(logits, _VOCABULARY, temperature),
            "torch": lambda: torch.log_softmax(logits / temperature, dim=-1),
        }
    )
    row |= {f"{name}_ms": round(value / 1e3, 4) for name, value in times.items()}
    return {**row, "ratio": round(times["ours"] / times["torch"], 3)}


def _cases() -> list[Callable[[], dict[str, Any]]]:
    def measured(model: str, rows: int, backward: bool) -> Callable[[], dict[str, Any]]:
        return lambda: head(model, rows, backward)

    heads = [measured(m, r, b) for m in _HIDDEN for r in _ROWS for b in (False, True)]
    return [*heads, *(lambda rows=rows: decode(rows) for rows in _DECODE_ROWS)]


def _compile(index: int, processes: int) -> None:
    """The kernels of every head of this share, run once."""
    for model, rows in [(m, r) for m in _HIDDEN for r in _ROWS][index::processes]:
        case = Case(rows, _HIDDEN[model])
        for memory in (_MEMORY, 1 << 30):
            case.ours(memory=memory).backward(case.gradient)
        case.ours(entropy=True)
    torch.cuda.synchronize()


def main(arguments: list[str]) -> int:
    """See the module."""
    if not torch.cuda.is_available():
        print("no GPU here", file=sys.stderr)
        return 2
    if arguments[:1] == ["--compile"]:
        _compile(int(arguments[1]), int(arguments[2]))
        return 0
    rows: list[dict[str, Any]] = []
    for measure in _cases():
        rows.append(measure())
        torch.cuda.empty_cache()
        Path(arguments[0]).write_text(json.dumps({**_environment(), "rows": rows}, indent=1) + "\n")
        row = rows[-1]
        print(
            f"{row['head']:4} {row['what']:20} rows {row['rows']:5}: "
            f"{row.get('ours_ms', 'other bits')} ms (entropy {row.get('ours_with_entropy_ms')}, "
            f"1 GiB {row.get('ours_1_GiB_ms')}), torch {row.get('torch_ms')}, chunked "
            f"{row.get('torch_chunked_ms')}; MiB {row.get('ours_peak_MiB')}, "
            f"{row.get('torch_peak_MiB')}, {row.get('torch_chunked_peak_MiB')}",
            flush=True,
        )
    return 1 if any(row["differing"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
