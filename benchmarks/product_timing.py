"""Time a product against torch.mm in one process; a product of other bits gets no time.

Both run as replays of a captured graph, round by round in turn, so that they meet the same clocks;
a time is the median over rounds. Weights stay where the cache leaves them, for both alike.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from miles_launcher.conformance.bits import differing
from sglang_patch.ops.linear.table import FewTile, choose

# Datasheet bandwidth (bytes/s) and dense bf16 rate (flop/s), for the floor.
_PEAKS = {"NVIDIA H200": (4.8e12, 989e12), "NVIDIA H100 80GB HBM3": (3.35e12, 989e12)}
_ROUNDS, _ROUND_MILLISECONDS = 7, 6.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A product: rows x k times (columns x k), K in `leaves`; what it is, and what it may cost:
    `target` over torch.mm, or what another's kernel was measured to take, in another run."""

    layer: str
    rows: int
    columns: int
    k: int
    leaves: int
    out_dtype: str
    target: float | None = None
    published_us: float | None = None


def _time(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median microseconds of each call."""
    graphs = {}
    for name, call in calls.items():
        call()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        number = int(min(200, max(3, _ROUND_MILLISECONDS / max(start.elapsed_time(stop), 0.004))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(number):
                call()
        graphs[name] = (graph, number)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_ROUNDS + 1):
        # Every other round backwards: whoever follows a pause finds higher clocks.
        order = list(graphs.items())[:: 1 if turn % 2 else -1]
        for name, (graph, number) in order:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            if turn:
                times[name].append(start.elapsed_time(stop) / number * 1e3)
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def processors() -> int:
    """Processors of the GPU present."""
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def _entry(shape: Shape) -> str:
    entry = choose(shape.rows, shape.columns, shape.k, shape.leaves, processors())
    if entry is None:
        return "general"
    if isinstance(entry, FewTile):
        return f"few {entry.block_n}x{entry.block_k}"
    parts = f" in {entry.parts}{' (last wave)' if entry.mixed else ''}" if entry.parts > 1 else ""
    return f"{entry.tile.name}{parts} {entry.levels.places}".strip()


Product = Callable[[torch.Tensor, torch.Tensor, Shape], torch.Tensor]
Named = Callable[[Shape], str]


def measure(
    shape: Shape, product: Product, general: Product, entry: Named = _entry
) -> dict[str, Any]:
    """One row of the report."""
    torch.manual_seed(shape.rows + shape.columns + shape.k)
    x = torch.randn(shape.rows, shape.k, device="cuda").bfloat16()
    weight = torch.randn(shape.columns, shape.k, device="cuda").bfloat16()
    out = product(x, weight, shape)
    wrong = differing(out, general(x, weight, shape))
    row: dict[str, Any] = {**asdict(shape), "entry": entry(shape), "differing": wrong}
    if wrong:
        return row
    calls: dict[str, Callable[[], Any]] = {
        "torch_mm": lambda: torch.mm(x, weight.t()),
        "ours": lambda: product(x, weight, shape),
    }
    if out.dtype == torch.float32:
        calls["torch_mm_fp32_out"] = lambda: torch.mm(x, weight.t(), out_dtype=torch.float32)
    times = _time(calls)
    row |= {f"{name}_us": value for name, value in times.items()}
    row["ratio"] = round(times["ours"] / times["torch_mm"], 3)
    if shape.published_us:
        row["over_published"] = round(times["ours"] / shape.published_us, 3)
    peaks = _PEAKS.get(torch.cuda.get_device_name(0))
    if peaks:
        moved = sum(t.numel() * t.element_size() for t in (x, weight, out))
        flops = 2 * shape.rows * shape.columns * shape.k
        row["floor_us"] = round(max(moved / peaks[0], flops / peaks[1]) * 1e6, 2)
    return row


def _environment() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return {
        "gpu": torch.cuda.get_device_name(0),
        "processors": torch.cuda.get_device_properties(0).multi_processor_count,
        "driver": driver[0] if driver else "unknown",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def report(
    path: Path,
    shapes: Iterable[Shape],
    product: Product,
    general: Product,
    entry: Named = _entry,
) -> list[dict[str, Any]]:
    """Measure all; `path` is rewritten as it grows. Returns the rows."""
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        rows.append(measure(shape, product, general, entry))
        path.write_text(json.dumps({**_environment(), "rows": rows}, indent=1) + "\n")
    return rows


def main(
    arguments: list[str],
    shapes: list[Shape],
    product: Product,
    general: Product,
    entry: Named = _entry,
) -> int:
    """`out.json` measures; `--compile I N` only fills Triton's cache with every N-th shape."""
    if not torch.cuda.is_available():
        print("no GPU here", file=sys.stderr)
        return 2
    if arguments[:1] == ["--compile"]:
        for shape in shapes[int(arguments[1]) :: int(arguments[2])]:
            columns = min(shape.columns, 1 << 14)
            x = torch.ones(shape.rows, shape.k, device="cuda", dtype=torch.bfloat16)
            product(x, torch.ones(columns, shape.k, device="cuda", dtype=torch.bfloat16), shape)
        torch.cuda.synchronize()
        return 0
    rows = report(Path(arguments[0]), shapes, product, general, entry)
    wrong = [row for row in rows if row["differing"]]
    for row in rows:
        print(
            f"{row['layer']:10} M {row['rows']:5} N {row['columns']:6} K {row['k']:5} "
            f"L {row['leaves']} {row['out_dtype'][:4]}: {row.get('ratio', 'other bits')} "
            f"(target {row['target']}) {row.get('ours_us')} us, "
            f"{row.get('over_published', '-')} of published, {row['entry']}"
        )
    return 1 if wrong else 0
