"""What several parts of the page say in the same way."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .markup import Markup, join, tag

OUTPUT = "output"
EMBEDDING, HEAD = "embedding", "head"

# Drawn, not typed: a font's glyphs differ, and an emoji font would colour them.
_ICONS = {
    "equal": "M3 6h10M3 10h10",
    "differ": "M3 6h10M3 10h10M11 2.5l-6 11",
    "check": "M2.5 8.5l3.5 3.5l7.5-8",
    "unknown": "M5.5 6a2.5 2.5 0 1 1 3.6 2.2c-.8.5-1.1.9-1.1 1.8M8 12.4v.8",
}


def icon(name: str, label: str | None = None) -> Markup:
    """A sign that does not need its colour; `label` where no word beside it says the same."""
    seen = {"role": "img", "aria_label": label} if label else {"aria_hidden": "true"}
    path = tag("path", d=_ICONS[name])
    return tag("svg", path, viewBox="0 0 16 16", class_="icon", **seen)


def number(count: int) -> str:
    """With separators: 4,096."""
    return f"{count:,}"


def breakable(text: str) -> Markup:
    """A path or a dotted name, which may go on in the next line after its separators."""
    return join([part, tag("wbr")] for part in re.split(r"(?<=[/.:_])(?=\w)", text))


def counted(count: int, one: str, many: str | None = None) -> str:
    """`1 row`, `2 rows`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def place(layer: int | None, op: str, tensor: str = OUTPUT) -> str:
    """`layer 1 o_proj`; of a tensor that enters it `input of layer 1 o_proj`."""
    text = op if layer is None else f"layer {layer} {op}"
    return text if tensor == OUTPUT else f"{tensor} of {text}"


def row_labels(ops: Sequence[Mapping[str, Any]]) -> list[int | str]:
    """For each op its layer; of one outside the layers the end of the model that it stands at."""
    labels: list[int | str] = []
    seen = False
    for op in ops:
        seen = seen or op["layer"] is not None
        labels.append((HEAD if seen else EMBEDDING) if op["layer"] is None else op["layer"])
    return labels


def is_first(op: Mapping[str, Any], first: Mapping[str, Any] | None) -> bool:
    """Whether this entry of `ops` is where the first divergence is."""
    return first is not None and all(op[key] == first[key] for key in ("layer", "op", "tensor"))


def share(count: int, of: int, what: str) -> Markup:
    """`12 of 384 token rows`, above a bar that shows the part."""
    part = count / of if of else 0.0
    # One of very many is still to be seen.
    width = f"--part:{max(100 * part, 1.5 if count else 0):.2f}%"
    text = join(tag("b", number(count)), f" of {number(of)} {what}")
    return tag("span", text, tag("i", style=width), class_="share")


def facts(rows: Sequence[tuple[str, Markup | str | int | None]]) -> Markup:
    """Names and values; a value of None is left out."""
    written = [
        tag("div", tag("dt", name), tag("dd", found)) for name, found in rows if found is not None
    ]
    return tag("dl", written, class_="facts")


def section(name: str, title: str, *children: Markup | None, note: str | None = None) -> Markup:
    """A part of the page under its heading."""
    heading = tag("h2", title, id=f"{name}-title")
    head = tag("header", heading, tag("p", note, class_="note") if note else None)
    return tag("section", head, *children, id=name, aria_labelledby=f"{name}-title")
