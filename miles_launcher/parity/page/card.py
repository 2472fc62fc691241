"""The first divergence: where, which bits, what it read, and what to look at."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from . import floats
from .markup import Markup, join, tag
from .words import OUTPUT, breakable, counted, facts, icon, number, place, section, share

_FIELDS = ("sign", "exponent", "mantissa")


def card(first: Mapping[str, Any], sides: Sequence[str]) -> Markup:
    """The section of a divergence."""
    reads = (
        "What it reads" if first["tensor"] == OUTPUT else f"What its {first['tensor']} is made of"
    )
    return section(
        "first",
        "The first divergence",
        tag(
            "div",
            tag("div", tag("h3", "Where"), _where(first, sides), class_="where"),
            tag("div", tag("h3", "The bits"), _bits(first, sides), class_="value"),
            tag("div", tag("h3", reads), _inputs(first), class_="reads"),
            tag("div", tag("h3", "What to look at"), _look_at(first, sides), class_="look"),
            class_="card",
        ),
    )


def _where(first: Mapping[str, Any], sides: Sequence[str]) -> Markup:
    token, element = first["token"], first["element"]
    odd = None
    if first["side"] is not None:
        rank = "" if first["rank"] is None else f" rank {first['rank']}"
        unlike = "every other rank" if first["judged_by"] == "ranks" else "the reference"
        odd = join(tag("b", first["side"] + rank), f" is unlike {unlike}")
    ranks = column = of = None
    if element is not None:
        ranks = " · ".join(f"{side} {element['ranks'][side]}" for side in sides)
        column = join(tag("b", f"column {number(element['column'])}"), f" ({element['dtype']})")
        of = share(element["differ"], element["of"], "elements of the row differ")
    at = f"sequence {token['sequence']}, position {token['position']}"
    return facts(
        [
            ("op", tag("b", place(first["layer"], first["op"]))),
            ("tensor", first["tensor"]),
            ("token", join(tag("b", f"id {token['id']}"), f", {token['part']}")),
            ("at", at),
            (
                "rows",
                share(
                    first["token_rows_differ"], first["token_rows_compared"], "token rows differ"
                ),
            ),
            ("element", column),
            ("elements", of),
            ("TP rank", ranks),
            ("odd one", odd),
        ]
    )


def _bits(first: Mapping[str, Any], sides: Sequence[str]) -> Markup:
    bits, element = first["bits"], first["element"]
    if bits is None or element is None:
        return tag("p", "The row itself was not stored, so there are no bits to show.")
    dtype = element["dtype"]
    if dtype not in floats.FORMATS:
        rows = [facts([(side, tag("code", bits[side]))]) for side in sides]
        return join(rows, tag("p", f"{dtype} is no format that this page takes apart."))
    split = [floats.fields(bits[side], dtype) for side in sides]
    widths = [len(part) for part in split[0]]
    head = [tag("td")] + [
        tag("th", tag("span", name, class_="field"), tag("small", f" {width}"), scope="col")
        for name, width in zip(_FIELDS, widths, strict=True)
    ]
    body = [
        tag(
            "tr",
            tag("th", side, scope="row"),
            map(_cells, mine, other),
        )
        for side, mine, other in zip(sides, split, reversed(split), strict=True)
    ]
    carets = [
        tag("td", [tag("i", class_="here" if a != b else None) for a, b in zip(*pair, strict=True)])
        for pair in zip(*split, strict=True)
    ]
    table = tag(
        "table",
        tag("caption", f"{dtype}, bit by bit", class_="unseen"),
        tag("thead", tag("tr", head)),
        tag("tbody", body),
        tag("tfoot", tag("tr", tag("td"), carets, aria_hidden="true")),
        class_=f"bits wide-{sum(widths)}",
    )
    return join(
        tag("div", table, class_="scroll", tabindex=0, role="group", aria_label="bit patterns"),
        _values(first, sides, dtype),
        tag("p", _which_bits(split), class_="note"),
    )


def _cells(mine: str, other: str) -> Markup:
    pairs = zip(mine, other, strict=True)
    shown = [tag("i", a, class_="odd" if a != b else None) for a, b in pairs]
    return tag("td", tag("span", mine, class_="unseen"), tag("span", shown, aria_hidden="true"))


def _which_bits(split: Sequence[tuple[str, str, str]]) -> str:
    named = []
    for name, *pair in zip(_FIELDS, *split, strict=True):
        a, b = pair
        wrong = [len(a) - 1 - at for at in range(len(a)) if a[at] != b[at]]
        if wrong and name == "sign":
            named.append("the sign")
        elif wrong:
            many = "" if len(wrong) == 1 else "s"
            named.append(f"{name} bit{many} {', '.join(map(str, wrong))} (0 is the lowest)")
    count = sum(a != b for pair in zip(*split, strict=True) for a, b in zip(*pair, strict=True))
    if not count:
        return "No bit differs in this element."
    verb = "differs" if count == 1 else "differ"
    return f"{counted(count, 'bit')} {verb}: {'; '.join(named)}."


def _values(first: Mapping[str, Any], sides: Sequence[str], dtype: str) -> Markup:
    bits, ulp = first["bits"], first["ulp"]
    values = [floats.value(bits[side], dtype) for side in sides]
    shown = [
        tag(
            "div",
            tag("dt", side),
            tag("dd", tag("b", floats.decimal(found, dtype)), tag("code", f"0x{bits[side]}")),
        )
        for side, found in zip(sides, values, strict=True)
    ]
    gap = values[1] - values[0]
    apart = "no distance" if ulp is None else f"{number(ulp)} ulp"
    why = "not both are finite numbers" if ulp is None else f"difference {gap:+.6g}"
    distance = tag("div", tag("dt", "distance"), tag("dd", tag("b", apart), tag("span", why)))
    return tag("dl", shown, distance, class_="values")


def _inputs(first: Mapping[str, Any]) -> Markup:
    rows = [
        _state(place(item["layer"], item["op"], item["tensor"]), item["equal"])
        for item in first["inputs"]
    ]
    rows.append(_state(tag("b", f"its {first['tensor']}"), False))
    none = None if first["inputs"] else tag("p", "Nothing before it was tapped.", class_="note")
    return join(none, tag("ul", rows, class_="inputs"))


def _state(name: str, equal: bool) -> Markup:
    sign, word = ("equal", "equal") if equal else ("differ", "differs")
    state = tag("span", icon(sign), word, class_=f"state {sign}")
    return tag("li", tag("span", name), state)


def _look_at(first: Mapping[str, Any], sides: Sequence[str]) -> Markup:
    look = first["look_at"]
    ours, theirs = (look[side] for side in sides)
    names = list(dict.fromkeys([*ours, *theirs]))
    rows = []
    for name in names:
        same = name in ours and name in theirs and ours[name] == theirs[name]
        cells = [
            tag("td", tag("code", breakable(written(found.get(name))))) for found in (ours, theirs)
        ]
        rows.append(
            tag("tr", tag("th", name, scope="row"), cells, class_=None if same else "other")
        )
    head = tag("tr", tag("td"), [tag("th", side, scope="col") for side in sides])
    table = tag("table", tag("thead", head), tag("tbody", rows), class_="pairs")
    policy = [(name, tag("code", written(found))) for name, found in look["policy"].items()]
    return join(
        tag("div", table, class_="scroll") if rows else None,
        join(tag("h4", "policy"), facts(policy)) if policy else None,
    )


def written(found: Any) -> str:
    """A value from JSON as a person writes it: text without quotation marks, the rest as JSON."""
    if found is None:
        return "none"
    return found if isinstance(found, str) else json.dumps(found, sort_keys=True)
