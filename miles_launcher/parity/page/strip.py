"""All layers and ops at a glance: a row a layer, a column an op, inputs narrow before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .markup import Markup, join, tag
from .words import EMBEDDING, HEAD, OUTPUT, counted, is_first, number, place, row_labels, section

STATES = {
    "equal": "equal",
    "first": "first divergence",
    "after": "differs after it",
    "untapped": "not tapped",
}
_Op = Mapping[str, Any]


def strip(ops: Sequence[_Op], first: Mapping[str, Any] | None) -> Markup:
    """The section. `ops` are in the order of the data flow."""
    rows = row_labels(ops)
    layers = [label for label in dict.fromkeys(rows) if isinstance(label, int)]
    columns = _columns(ops)
    keys = [(op, tensor) for op, tensors in columns.items() for tensor in tensors]
    cells = {
        (label, op["op"], op["tensor"]): _cell(op, _state(op, first))
        for label, op in zip(rows, ops, strict=True)
    }
    ends: dict[int | str, list[_Op]] = {
        end: [op for label, op in zip(rows, ops, strict=True) if label == end]
        for end in (EMBEDDING, HEAD)
    }
    at = {label for label, op in zip(rows, ops, strict=True) if is_first(op, first)}
    lines = []
    order: list[int | str] = [EMBEDDING, *layers, HEAD]
    for label in order:
        if isinstance(label, int):
            drawn = [cells.get((label, *key)) or _untapped(label, *key) for key in keys]
        elif ends[label]:
            # The ends have ops of their own, which no column fits.
            beside = [_cell(op, _state(op, first), "div") for op in ends[label]]
            drawn = [tag("td", tag("div", beside), role="none", colspan=max(1, len(keys)))]
        else:
            continue
        head = tag("th", str(label), scope="row", class_="at" if label in at else None)
        lines.append(tag("tr", head, drawn, class_="end" if label in ends else None))
    density = "roomy" if len(layers) <= 12 else "medium" if len(layers) <= 40 else "dense"
    table = tag(
        "table",
        tag("caption", "token rows that differ, by layer and op", class_="unseen"),
        tag("colgroup", tag("col"), [tag("col", class_=_kind(tensor)) for _, tensor in keys]),
        tag("thead", tag("tr", tag("td"), _heads(columns, first))),
        tag("tbody", lines),
        class_=f"strip {density}",
        role="grid",
    )
    counts = Counter(_state(op, first) for op in ops)
    counts["untapped"] = len(layers) * len(keys) - sum(op["layer"] is not None for op in ops)
    hint = "Point at a cell, or step through them with the arrow keys."
    return section(
        "strip",
        "Every layer, every op",
        tag("div", table, class_="scroll"),
        tag("p", hint, class_="readout"),
        _legend(counts, any(tensor != OUTPUT for _, tensor in keys)),
        note=_summary(ops),
    )


def _summary(ops: Sequence[_Op]) -> str:
    wrong = sum(op["differ"] > 0 for op in ops)
    tapped = counted(len(ops), "tapped tensor")
    return f"{number(wrong)} of {tapped} differ" if wrong else f"all {tapped} equal"


def _columns(ops: Sequence[_Op]) -> dict[str, list[str]]:
    """Ops of the layers in their order, each with its inputs and then its output."""
    names: list[str] = []
    tensors: dict[str, dict[str, None]] = {}
    at = 0
    for op in ops:
        if op["layer"] is None:
            continue
        if op["op"] not in names:
            # (One that only a later layer has goes after what it follows there.)
            names.insert(at, op["op"])
        at = names.index(op["op"]) + 1
        tensors.setdefault(op["op"], {})[op["tensor"]] = None
    return {name: sorted(tensors[name], key=lambda tensor: tensor == OUTPUT) for name in names}


def _state(op: _Op, first: Mapping[str, Any] | None) -> str:
    return "first" if is_first(op, first) else "after" if op["differ"] else "equal"


def _kind(tensor: str) -> str:
    return "out" if tensor == OUTPUT else "in"


def _heads(columns: Mapping[str, Sequence[str]], first: Mapping[str, Any] | None) -> list[Markup]:
    heads = []
    for op, tensors in columns.items():
        # A name may break after an underscore, and nowhere else.
        *words, last = op.split("_")
        name = tag("span", [join(word, "_", tag("wbr")) for word in words], last)
        at = first is not None and first["layer"] is not None and first["op"] == op
        heads.append(
            tag("th", name, scope="col", colspan=len(tensors), class_="at" if at else None)
        )
    return heads


def _cell(op: _Op, state: str, element: str = "td") -> Markup:
    """`element`: div for an op outside the layers, which has its name in it."""
    outside = element == "div"
    rows = f"{number(op['differ'])} of {number(op['rows'])} token rows differ"
    # Its root, so that a few rows among many still have a shade of their own.
    part = (op["differ"] / op["rows"]) ** 0.5 if op["rows"] else 0
    kind = _kind(op["tensor"])
    return tag(
        element,
        tag("span", op["op"]) if outside and kind == "out" else None,
        tag("b", number(op["differ"])) if op["differ"] else None,
        class_=f"cell {state} {kind}",
        title=f"{place(op['layer'], op['op'], op['tensor'])}: {STATES[state]}, {rows}",
        style=f"--part:{part:.3f}" if state == "after" else None,
        role="gridcell" if outside else None,
        tabindex=-1,
    )


def _untapped(label: int, op: str, tensor: str) -> Markup:
    title = f"{place(label, op, tensor)}: {STATES['untapped']}"
    return tag("td", class_=f"cell untapped {_kind(tensor)}", title=title, tabindex=-1)


def _legend(counts: Mapping[str, int], inputs: bool) -> Markup:
    items = [
        tag("li", tag("i", class_=f"key {state}"), text, " ", tag("b", number(counts[state])))
        for state, text in STATES.items()
        if counts[state]
    ]
    shade = tag("li", "stronger: more of the token rows") if counts["after"] else None
    narrow = tag("li", "a narrow cell is an input of the op after it") if inputs else None
    return tag("ul", items, shade, narrow, class_="legend")
