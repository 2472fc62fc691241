"""How far apart the elements of the first differing op are, in units in the last place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .markup import Markup, join, tag
from .words import counted, facts, number, place, section, share


def ulp_histogram(found: Mapping[str, Any] | None, equal: bool) -> Markup:
    """The section; `buckets` are [first, last, count], both ends included."""
    if found is None:
        why = "Nothing differs." if equal else "No distances were counted."
        return section("ulp", "Distances in ulp", tag("p", why, class_="empty"))
    buckets = _without_empty_ends(found["buckets"])
    most = max((count for *_, count in buckets), default=0)
    rows = [_row(low, high, count, most, found["differ"]) for low, high, count in buckets]
    if found["not_numbers"]:
        rows.append(_line("not a number", found["not_numbers"], 0, found["differ"], "nan"))
    table = tag(
        "table",
        tag("caption", "differing elements by distance", class_="unseen"),
        tag(
            "thead",
            tag("tr", [tag("th", name, scope="col") for name in ("ulp", "elements", "share")]),
        ),
        tag("tbody", rows),
        class_="histogram",
    )
    about = [
        ("differ", share(found["differ"], found["elements"], "elements")),
        ("in", counted(found["rows"], "stored token row")),
        ("not numbers", number(found["not_numbers"])),
    ]
    where = place(found["layer"], found["op"], found["tensor"])
    return section("ulp", "Distances in ulp", facts(about), table, note=where)


def _without_empty_ends(buckets: Any) -> list[tuple[int, int, int]]:
    filled = [at for at, (*_, count) in enumerate(buckets) if count]
    return [tuple(item) for item in buckets[filled[0] : filled[-1] + 1]] if filled else []


def _row(low: int, high: int, count: int, most: int, of: int) -> Markup:
    label = number(low) if low == high else f"{_short(low)} to {_short(high)}"
    return _line(label, count, 100 * count / most if most else 0, of)


def _short(count: int) -> str:
    """Powers of two from 65,536 on: 2^16, 2^17-1."""
    if count >= 65536:
        for text, power in (("", count), ("-1", count + 1)):
            if power & (power - 1) == 0:
                return f"2^{power.bit_length() - 1}{text}"
    return number(count)


def _line(label: str, count: int, width: float, of: int, kind: str | None = None) -> Markup:
    # A single element among millions still has a bar.
    bar = tag("i", style=f"--part:{max(width, 0.6 if count else 0):.2f}%")
    part = 100 * count / of if of else 0
    shown = "0" if not count else f"{part:.1f}%" if part >= 0.1 else "<0.1%"
    return tag(
        "tr",
        tag("th", label, scope="row"),
        tag("td", join(bar, tag("b", number(count)))),
        tag("td", shown),
        class_=kind,
    )
