"""The tables of docs/performance.md, rendered from the committed results. Standard library only.

    python3 -m benchmarks.tables            # exit code 1 where the document is not what they say
    python3 -m benchmarks.tables --write    # mend it

In the document a table stands between `<!-- table NAME FILE -->` and `<!-- end -->`; FILE is
relative to docs/.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
DOCUMENT: Final = DOCS / "performance.md"
_BLOCK: Final = re.compile(r"(<!-- table (\w+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

Document = Mapping[str, Any]
Row = Mapping[str, Any]


def grid(header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """A Markdown table; the first `text_columns` are aligned left, the others right."""
    rule = ["---"] * text_columns + ["--:"] * (len(header) - text_columns)
    return "".join("| " + " | ".join(line) + " |\n" for line in (header, rule, *rows))


def ratio(row: Row | None, target: float | None = None) -> str:
    """Two decimals, bold above the target; empty where nothing was measured."""
    if row is None or "ratio" not in row:
        return ""
    limit = row.get("target") if target is None else target
    text = f"{row['ratio']:.2f}"
    return f"**{text}**" if limit is not None and row["ratio"] > limit else text


def _of(document: Document, **wanted: Any) -> list[Row]:
    return [r for r in document["rows"] if all(r[key] == value for key, value in wanted.items())]


def _only(document: Document, **wanted: Any) -> Row | None:
    found = _of(document, **wanted)
    assert len(found) <= 1, wanted
    return found[0] if found else None


def _distinct(document: Document, key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in document["rows"]))


def row_linear(document: Document) -> str:
    """TP=1: a line for each layer and number of segments."""
    sizes = _distinct(document, "rows")
    lines = []
    for layer in _distinct(document, "layer"):
        name, _, degree = layer.rpartition(" ")
        for leaves in (1, 2, 4, 8) if degree == "TP=1" else ():
            cells = [_only(document, layer=layer, leaves=leaves, rows=m) for m in sizes]
            shape = f"({cells[0]['columns']}, {cells[0]['k']})" if cells[0] else ""
            lines.append([f"{name} {shape}", str(leaves), *map(ratio, cells)])
    return grid(["layer", "L", *(f"M={m}" for m in sizes)], lines)


def segments(document: Document) -> str:
    """o_proj and down_proj together, over the same sum at one segment."""
    sizes = [m for m in _distinct(document, "rows") if m != 128]

    def total(model: str, leaves: int, rows: int) -> float:
        pair = [
            _only(document, layer=f"{model} {layer} TP=1", leaves=leaves, rows=rows)
            for layer in ("o_proj", "down_proj")
        ]
        return sum(row["ours_us"] for row in pair if row)

    models = list(dict.fromkeys(layer.split()[0] for layer in _distinct(document, "layer")))
    lines = [
        [model, str(s), *(f"{total(model, s, m) / total(model, 1, m):.2f}" for m in sizes)]
        for model in models
        for s in (2, 4, 8)
    ]
    return grid(["model", "S", *(f"M={m}" for m in sizes)], lines)


def partial_sums(document: Document) -> str:
    """TP>1: median and worst over the layers, for either output of torch.mm."""
    lines = []
    for rows in _distinct(document, "rows"):
        for leaves in (1, 2, 4):
            found = _of(document, rows=rows, leaves=leaves, out_dtype="float32")
            both = (
                [row["ours_us"] / row[peer] for row in found]
                for peer in ("torch_mm_us", "torch_mm_fp32_out_us")
            )
            texts = [f"{statistics.median(r):.2f}, {max(r):.2f}" for r in both]
            lines.append([str(rows), str(leaves), *texts])
    header = ["M", "L", "over bf16 `torch.mm`", "over fp32 `torch.mm`"]
    return grid(header, lines, text_columns=0)


def linear(document: Document) -> str:
    """Column-parallel layers; lm_head over the fp32 form of torch.mm."""
    sizes = _distinct(document, "rows")
    lines = []
    for layer in _distinct(document, "layer"):
        cells = [_only(document, layer=layer, rows=m) for m in sizes]
        if cells[0] and "torch_mm_fp32_out_us" in cells[0]:
            cells = [
                row and {**row, "ratio": row["ours_us"] / row["torch_mm_fp32_out_us"]}
                for row in cells
            ]
        shape = f"({cells[0]['columns']}, {cells[0]['k']})" if cells[0] else ""
        lines.append([f"{layer} {shape}", *map(ratio, cells)])
    return grid(["layer (N, K)", *(f"M={m}" for m in sizes)], lines)


def row_linear_v1(document: Document) -> str:
    """Contract v1: a line for each layer, with its tiles of K."""
    sizes = _distinct(document, "rows")
    lines = []
    for layer in _distinct(document, "layer"):
        cells = [_only(document, layer=layer, rows=m) for m in sizes]
        shape = f"({cells[0]['columns']}, {cells[0]['k']})" if cells[0] else ""
        tiles = str(cells[0]["leaves"]) if cells[0] else ""
        lines.append([f"{layer} {shape}", tiles, *map(ratio, cells)])
    return grid(["layer (N, K)", "T", *(f"M={m}" for m in sizes)], lines)


def published(document: Document) -> str:
    """Contract v1 beside the published kernel's medians, which are of a run of their own."""
    lines = []
    for row in document["rows"]:
        if row.get("published_us"):
            ours = row.get("ours_us")
            cells = [f"{row['published_us']:.0f}"]
            cells += [f"{ours:.1f}", f"{row['published_us'] / ours:.1f}"] if ours else ["", ""]
            lines.append(
                [f"{row['layer']} ({row['columns']}, {row['k']})", str(row["rows"]), *cells]
            )
    return grid(["layer (N, K)", "M", "published, us", "here, us", "times faster"], lines)


def collectives(document: Document) -> str:
    """Sums over ranks in microseconds, and the form that a row-parallel linear takes over NCCL."""
    forms = list(dict.fromkeys(form for row in document["rows"] for form in row.get("us", {})))
    lines = [
        [
            str(row["rows"]),
            *(f"{row['us'][form]:.1f}" if form in row["us"] else "" for form in forms),
            *(f"{row[f'over_nccl_{dtype}']:.2f}" for dtype in ("bf16", "fp32")),
        ]
        for row in document["rows"]
        if "us" in row
    ]
    return grid(["rows", *forms, "over NCCL bf16", "over NCCL fp32"], lines, text_columns=0)


def attention(document: Document) -> str:
    """A line for each phase and batch: over PyTorch's FlashAttention, and over FA3 where it ran."""
    lines = []
    for row in document["rows"]:
        beside = f"{row['over_fa3']:.2f}" if "over_fa3" in row else ""
        batch = f"{row['sequences']} x {row['keys']}"
        lines.append(
            [row["kind"], str(row["head_dim"]), batch, ratio(row), beside]
            + [str(row.get(key, "")) for key in ("ours_us", "floor_us")]
        )
    header = ["", "head_dim", "sequences x keys", "over PyTorch", "over FA3", "us", "floor, us"]
    return grid(header, lines)


_NO_ROW: Final = "—"


def _elementwise(document: Document, key: str, target: float, least_rows: int) -> str:
    """A line an op, pass and model; bold below the target, where the inputs are large."""
    sizes = [rows for rows in _distinct(document, "rows") if rows >= least_rows]
    lines = []
    for op in _distinct(document, "op"):
        for way in ("forward", "backward"):
            for model in _distinct(document, "model"):
                cells = []
                for rows in sizes:
                    row = _only(document, op=op, model=model, rows=rows, **{"pass": way})
                    if row is None or key not in row:
                        cells.append("wrong" if row else _NO_ROW)
                        continue
                    text = f"{row[key]:.2f}" if key == "of_copy_bandwidth" else f"{row[key]:.1f}"
                    cells.append(f"**{text}**" if row[key] < target else text)
                if set(cells) != {_NO_ROW}:
                    lines.append([f"{op}, {way}", model, *cells])
    return grid(["op", "model", *(f"T={rows}" for rows in sizes)], lines, text_columns=2)


def elementwise_bandwidth(document: Document) -> str:
    """Share of the bandwidth of a copy of the same bytes, for large inputs."""
    return _elementwise(document, "of_copy_bandwidth", 0.85, 2048)


def elementwise_stock(document: Document) -> str:
    """The stock path's time over ours."""
    return _elementwise(document, "stock_over_ours", 2.0, 1)


def elementwise_launches(document: Document) -> str:
    """How many kernels and copies one call starts."""
    found = [row for row in document["rows"] if "ours_launches" in row]
    lines = [
        [f"{row['op']}, {row['pass']}", str(row["ours_launches"]), str(row["stock_launches"])]
        for row in found
    ]
    return grid(["op", "ours", "stock"], lines)


def logprobs(document: Document) -> str:
    """The head's time over plain PyTorch's, and what each holds at its peak."""
    lines = []
    for row in document["rows"]:
        held = [row.get(f"{name}_peak_MiB") for name in ("ours", "torch", "torch_chunked")]
        cells = [f"{row['ours_ms']:.3f}" if "ours_ms" in row else "", ratio(row)]
        cells += ["" if size is None else f"{size:.0f}" for size in held]
        lines.append([row["head"], row["what"], str(row["rows"]), *cells])
    header = ["head", "", "rows", "ms", "over PyTorch", "MiB", "PyTorch", "PyTorch in chunks"]
    return grid(header, lines, text_columns=2)


def engine_throughput(document: Document) -> str:
    """Tokens a second of each engine, and the contract's over the others' (target 0.90)."""
    variants = _distinct(document, "variant")
    others = [variant for variant in variants if variant != "contract"]
    lines = []
    for found in document["ratios"]:
        place = {key: found[key] for key in ("what", "batch", "prompt_tokens")}
        cells = [_only(document, variant=variant, **place) for variant in variants]
        speeds = [f"{row['tokens_per_s']:.0f}" if row else "" for row in cells]
        shares = [_share(found.get(f"over_{other}")) for other in others]
        lines.append([f"{found['what']}, {found['batch']} x {found['prompt_tokens']}"])
        lines[-1] += [*speeds, *shares]
    return grid(["tokens a second", *variants, *(f"over {other}" for other in others)], lines)


def train_throughput(document: Document) -> str:
    """Milliseconds of each trainer, and the contract's speed over the others' (target 0.90)."""
    variants = _distinct(document, "variant")
    others = [variant for variant in variants if variant != "contract"]
    lines = []
    for found in document["ratios"]:
        cells = [_only(document, what=found["what"], variant=variant) for variant in variants]
        lines.append([found["what"].replace("_", " and ")])
        lines[-1] += [f"{row['ms']:.1f}" if row else "" for row in cells]
        lines[-1] += [_share(found.get(f"over_{other}")) for other in others]
    header = ["ms", *variants, *(f"over {other.replace('_', ', ')}" for other in others)]
    return grid(header, lines)


def _share(value: float | None, target: float = 0.9) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value >= target else f"**{value:.2f}**"


def steps(document: Document) -> str:
    """Seconds of each phase of the gate's training steps."""
    (entry,) = [e for e in document["configurations"] if e["name"] == "tp1:training"]
    found = entry["facts"]["steps"]
    phases = list(found[0]["seconds"])
    lines = [
        [str(number), *(f"{step['seconds'][phase]:.2f}" for phase in phases)]
        for number, step in enumerate(found)
    ]
    header = ["step", *(phase.replace("_", " ") for phase in phases)]
    return grid(header, lines, text_columns=0)


TABLES: Final[Mapping[str, Callable[[Document], str]]] = {
    "row_linear": row_linear,
    "segments": segments,
    "partial_sums": partial_sums,
    "linear": linear,
    "logprobs": logprobs,
    "row_linear_v1": row_linear_v1,
    "published": published,
    "collectives": collectives,
    "attention": attention,
    "elementwise_bandwidth": elementwise_bandwidth,
    "elementwise_stock": elementwise_stock,
    "elementwise_launches": elementwise_launches,
    "engine_throughput": engine_throughput,
    "train_throughput": train_throughput,
    "steps": steps,
}


def render(text: str) -> str:
    """`text` with every marked table made anew. `ValueError` for an unknown table or file."""

    def table(match: re.Match[str]) -> str:
        begin, name, file, end = match.groups()
        path = DOCS / file
        if name not in TABLES or not path.is_file():
            raise ValueError(f"table {name} {file}: no such table or file below {DOCS.name}/")
        return begin + TABLES[name](json.loads(path.read_text())) + end

    return _BLOCK.sub(table, text)


def main(arguments: list[str]) -> int:
    """0: the document says what the results say; 1: it does not (and `--write` was not given)."""
    text = DOCUMENT.read_text()
    wanted = render(text)
    if "--write" in arguments:
        DOCUMENT.write_text(wanted)
    elif text != wanted:
        print(f"{DOCUMENT.name}: tables differ from the results; --write mends them")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
