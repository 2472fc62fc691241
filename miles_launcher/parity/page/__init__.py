"""`bisect.html`: what `bisect.json` holds, as one page that needs no network and no server."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from .card import card
from .fingerprints import fingerprints
from .form import check, sides_of
from .headline import EQUAL, footer, headline, page_title, status
from .heat import heat_map
from .markup import Markup, tag
from .strip import strip
from .ulp import ulp_histogram

PAGE_FILE = "bisect.html"


def write_page(data: Mapping[str, Any], path: Path) -> None:
    """Write the page of `data` to `path`, whole or not at all.

    Raises `ValueError` naming what is missing from `data` or ill-formed in it.
    """
    # (JSON may hold half a surrogate pair, which UTF-8 cannot.)
    text = page(data).encode("utf-8", "replace")
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(text)
    temporary.rename(path)


def page(data: Mapping[str, Any]) -> str:
    """The page of `data`; raises `ValueError` as `write_page` does."""
    check(data)
    sides = sides_of(data)
    first, ops = data.get("first_divergence"), data.get("ops")
    equal = status(data) == EQUAL
    body = [
        headline(data),
        card(first, sides) if first is not None else None,
        strip(ops, first) if ops else None,
        heat_map(data, equal) if ops else None,
        tag(
            "div",
            ulp_histogram(data.get("ulp"), equal) if ops else None,
            fingerprints(data["fingerprint"], sides, unfold=not ops),
            class_="beside" if ops else None,
        ),
        footer(data),
    ]
    style, script = _asset("page.css"), _asset("page.js")
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", page_title(data)),
        tag("style", style),
    ]
    whole = tag(
        "html", tag("head", head), tag("body", tag("main", body), tag("script", script)), lang="en"
    )
    return f"<!doctype html>\n{whole}\n"


def _asset(name: str) -> Markup:
    return Markup(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


def _policy(script: str) -> str:
    """Nothing is fetched, and no script runs but this one."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
