"""HTML that is escaped by construction: only what `tag` made goes into a page as it is."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


# What may stand inside an element; None stands for nothing.
Child = str | int | None | Iterable["Child"]


def join(*children: Child) -> Markup:
    """The children one after the other; what is not `Markup` is escaped."""
    parts = []
    for child in children:
        if isinstance(child, Markup):
            parts.append(str(child))
        elif isinstance(child, str | int):
            parts.append(html.escape(str(child)))
        elif child is not None:
            parts.append(join(*child))
    return Markup("".join(parts))


def tag(name: str, /, *children: Child, **attributes: str | int | bool | None) -> Markup:
    """An element. `class_` is written class and `aria_label` aria-label; True is an attribute
    without a value; an attribute of None or False is left out."""
    written = []
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            written.append(f" {key}")
        elif value is not None and value is not False:
            written.append(f' {key}="{html.escape(str(value))}"')
    opened = f"<{name}{''.join(written)}>"
    if name in ("col", "meta", "wbr"):
        return Markup(opened)
    return Markup(f"{opened}{join(*children)}</{name}>")


def embedded(name: str, data: Any) -> Markup:
    """`data` as JSON that a script reads from the element called `name`.

    No `<` is left in it, so that no string can end the element early. Raises `ValueError` where a
    number is not finite.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return tag("script", Markup(text), type="application/json", id=name)
