"""Both fingerprints side by side, what differs first."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .card import written
from .markup import Markup, join, tag
from .words import counted, icon, section

_ABSENT = object()


def fingerprints(
    found: Mapping[str, Mapping[str, Any]], sides: Sequence[str], unfold: bool
) -> Markup:
    """The section; a side that gave none is said to have given none. `unfold`: show equal keys."""
    absent = [side for side in sides if not found.get(side)]
    flat = [dict(_flat(found.get(side, {}))) for side in sides]
    names = list(dict.fromkeys([*flat[0], *flat[1]]))
    pairs = [(name, flat[0].get(name, _ABSENT), flat[1].get(name, _ABSENT)) for name in names]
    # To Python True and 1, or 1 and 1.0, are equal.
    same = [type(ours) is type(theirs) and ours == theirs for _, ours, theirs in pairs]
    other = [pair for pair, alike in zip(pairs, same, strict=True) if not alike]
    equal = [pair for pair, alike in zip(pairs, same, strict=True) if alike]
    parts: list[Markup | None] = []
    if absent:
        text = f"{' and '.join(absent)} gave no fingerprint before the run ended."
        parts.append(tag("p", text, class_="empty"))
    if other:
        rows = [_row(name, ours, theirs) for name, ours, theirs in other]
        parts.append(_table(rows, sides, f"{counted(len(other), 'key')} not equal"))
    if equal:
        rows = [
            tag(
                "tr", tag("th", name, scope="row"), tag("td", tag("code", written(ours)), colspan=2)
            )
            for name, ours, _ in equal
        ]
        head = join(icon("equal"), f"{counted(len(equal), 'equal key')}")
        table = _table(rows, sides, "equal keys")
        parts.append(tag("details", tag("summary", head), table, class_="equal", open=unfold))
    if other:
        note = f"{len(other)} of {counted(len(pairs), 'key')} differ"
    else:
        note = f"all {counted(len(pairs), 'key')} equal" if pairs else "none to compare"
    return section("fingerprints", "Fingerprints", *parts, note=note)


def _flat(found: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested objects and lists as dotted names, so that the one inner value that differs shows."""
    if isinstance(found, Mapping) and (found or not prefix):
        items = [(str(key), item) for key, item in found.items()]
    elif isinstance(found, list | tuple) and found:
        items = [(str(number), item) for number, item in enumerate(found)]
    else:
        yield prefix, found
        return
    for key, item in items:
        yield from _flat(item, f"{prefix}.{key}" if prefix else key)


def _table(rows: Sequence[Markup], sides: Sequence[str], caption: str) -> Markup:
    head = tag("tr", tag("td"), [tag("th", side, scope="col") for side in sides])
    table = tag(
        "table",
        tag("caption", caption, class_="unseen"),
        tag("thead", head),
        tag("tbody", rows),
        class_="pairs",
    )
    return tag("div", table, class_="scroll")


def _row(name: str, ours: Any, theirs: Any) -> Markup:
    texts = ["not given" if value is _ABSENT else written(value) for value in (ours, theirs)]
    shared = len(os.path.commonprefix(texts))
    cells = [
        tag("td", tag("code", text[:shared], tag("mark", text[shared:]) if text[shared:] else None))
        for text in texts
    ]
    heading = tag("th", icon("differ", "differs"), name, scope="row")
    return tag("tr", heading, cells, class_="other")
