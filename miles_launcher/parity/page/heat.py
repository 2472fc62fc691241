"""The heat map: which tokens differ in which layer. A script draws it; a table has its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .markup import Markup, embedded, tag
from .words import counted, is_first, number, row_labels, section


def heat_map(data: Mapping[str, Any], equal: bool) -> Markup:
    """The section; where nothing differs it says so."""
    heat = data.get("heat")
    tokens = sum(map(len, data.get("tokens", ())))
    if heat is None or not any(map(any, heat["rows_differ"])):
        if equal or heat is not None:
            text = f"No token differs in any layer: {counted(tokens, 'token')} of "
            text += f"{counted(len(data.get('tokens', ())), 'sequence')}."
        else:
            text = "No map of tokens and layers was recorded."
        return section("heat", "Tokens and layers", tag("p", text, class_="empty"))
    wrong = sum(map(any, heat["rows_differ"]))
    exact = sum(
        row is not None and any(differ)
        for row, differ in zip(heat["elements_differ"], heat["rows_differ"], strict=True)
    )
    of = counted(len(heat["tokens"]), "token")
    label = f"{number(wrong)} of {of} differ in at least one of {len(heat['layers'])} layers"
    elements = "none" if not exact else "all" if exact == wrong else number(exact)
    canvas = tag("canvas", tabindex=0, role="img", aria_label=f"{label}; numbers below the map")
    hint = "Point at the map, or focus it and use the arrow keys."
    return section(
        "heat",
        "Tokens and layers",
        _choices(0 < exact < wrong),
        tag("div", canvas, tag("span", class_="cursor", hidden=True), class_="map"),
        tag("noscript", tag("p", "The map is drawn by a script; its numbers are below.")),
        tag("p", hint, class_="readout", role="status"),
        _legend(heat, exact, wrong),
        _by_layer(heat),
        embedded("heat-data", _for_script(data, heat)),
        note=f"{number(wrong)} of {of} differ; elements were counted in {elements} of these",
    )


def _choices(mixed: bool) -> Markup:
    """Only a script can act on them, so only a script shows them."""
    shown = tag("select", tag("option", "all sequences", value=""), name="sequence")
    counts = tag(
        "select",
        tag("option", "elements, where counted", value="elements"),
        tag("option", "tensors, for every token", value="tensors"),
        name="measure",
    )
    return tag(
        "form",
        tag("label", "colour by ", counts, hidden=not mixed),
        tag("label", "show ", shown),
        class_="choices",
        hidden=True,
    )


def _most(rows: Sequence[Sequence[int] | None]) -> int:
    return max((max(row, default=0) for row in rows if row is not None), default=0)


def _legend(heat: Mapping[str, Any], exact: int, wrong: int) -> Markup:
    items = []
    if exact:
        most = number(_most(heat["elements_differ"]))
        items.append(_ramp("elements", "differing elements", most))
    if exact < wrong:
        items.append(
            _ramp(
                "tensors",
                "differing tensors, elements not counted",
                number(_most(heat["rows_differ"])),
            )
        )
    items.append(tag("li", tag("i", class_="key none"), "equal"))
    items.append(tag("li", tag("i", class_="key prompt"), "prompt"))
    items.append(tag("li", tag("i", class_="key response"), "response"))
    return tag("ul", items, class_="legend")


def _ramp(kind: str, text: str, most: str) -> Markup:
    return tag("li", text, " 1", tag("i", class_=f"ramp {kind}"), most)


def _by_layer(heat: Mapping[str, Any]) -> Markup:
    """The text alternative: of each layer how many tokens, the first one, and the worst one."""
    rows = []
    for at, layer in enumerate(heat["layers"]):
        tokens = [n for n, row in enumerate(heat["rows_differ"]) if row[at]]
        cells: list[str] = ["0", "", "", ""]
        if tokens:
            counts = [(heat["elements_differ"][n] or ())[at:][:1] for n in tokens]
            known = [count[0] for count in counts if count]
            most = max(heat["rows_differ"][n][at] for n in tokens)
            first = min(tokens, key=lambda n: heat["tokens"][n][::-1])
            sequence, position = heat["tokens"][first]
            cells = [
                number(len(tokens)),
                f"sequence {sequence} position {position}",
                number(most),
                number(max(known)) if known else "not counted",
            ]
        rows.append(tag("tr", tag("th", str(layer), scope="row"), [tag("td", c) for c in cells]))
    names = ("layer", "tokens", "earliest", "most tensors", "most elements")
    table = tag(
        "table",
        tag("thead", tag("tr", [tag("th", name, scope="col") for name in names])),
        tag("tbody", rows),
        class_="plain",
    )
    summary = tag("summary", "The map as numbers, layer by layer")
    return tag("details", summary, tag("div", table, class_="scroll"))


def _for_script(data: Mapping[str, Any], heat: Mapping[str, Any]) -> dict[str, Any]:
    first = data.get("first_divergence")
    mark = None
    if first is not None:
        ops = data.get("ops", ())
        label = next(
            label for label, op in zip(row_labels(ops), ops, strict=True) if is_first(op, first)
        )
        token = [first["token"]["sequence"], first["token"]["position"]]
        tokens = [list(pair) for pair in heat["tokens"]]
        if token in tokens and label in heat["layers"]:
            mark = [tokens.index(token), heat["layers"].index(label)]
    tapped = dict.fromkeys(heat["layers"], 0)
    for label in row_labels(data.get("ops", ())):
        tapped[label] = tapped.get(label, 0) + 1
    return {
        "layers": heat["layers"],
        "tokens": heat["tokens"],
        "tensors": heat["rows_differ"],
        "elements": heat["elements_differ"],
        "tapped": [tapped[label] for label in heat["layers"]],
        "most": {
            "tensors": _most(heat["rows_differ"]),
            "elements": _most(heat["elements_differ"]),
        },
        "first": mark,
        "ids": data.get("tokens", []),
        "prompts": data.get("prompt_lengths", []),
    }
