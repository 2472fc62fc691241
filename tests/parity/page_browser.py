"""A page in a real browser without a screen: its document, its picture, and its complaints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--enable-logging=stderr",
    "--v=0",
)
_MARK = "MILES_PAGE_TEST"
SCHEMES = {"dark": 0, "light": 1}


class Dom(HTMLParser):
    """Start tags with their attributes, and all text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text, self._raw = "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))
        self._raw = tag if tag in ("script", "style") else self._raw

    def handle_endtag(self, tag: str) -> None:
        self._raw = "" if tag == self._raw else self._raw

    def handle_data(self, data: str) -> None:
        self.text += "" if self._raw else data

    def of_class(self, *names: str) -> list[dict[str, str]]:
        found = [attributes for _, attributes in self.tags]
        return [each for each in found if set(names) <= set(each.get("class", "").split())]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


@dataclass(frozen=True)
class Seen:
    """What a browser made of a page: its document afterwards, a picture, the console's lines."""

    dom: Dom
    picture: Path
    console: list[str]

    @property
    def root(self) -> dict[str, str]:
        return next(found for tag, found in self.dom.tags if tag == "html")

    @property
    def probe(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.root["data-probe"])
        return found

    def pixels(self, colour: str) -> int:
        """How many have exactly this colour (of page.css)."""
        with Image.open(self.picture) as image:
            counts = {c: n for n, c in image.convert("RGB").getcolors(1 << 24) or []}
        return counts.get(tuple(bytes.fromhex(colour[1:])), 0)


def _end(mark: str) -> list[str]:
    """Ends what a browser left running, named by a variable that its children inherit."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark:
                left.append(process)
        except (psutil.Error, OSError):
            continue
    _, alive = psutil.wait_procs(left, timeout=10)
    for process in alive:
        process.kill()
    return [str(process) for process in alive]


def find_browser() -> str:
    """The program; without one skips or, where `MILES_REQUIRE_BROWSER=1`, fails."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        if os.environ.get("MILES_REQUIRE_BROWSER") == "1":
            pytest.fail(f"none of {', '.join(BROWSERS)} is installed, and MILES_REQUIRE_BROWSER=1")
        pytest.skip("no Chromium found: not looked at in a browser")
    return program


def look(path: Path, width: int = 1400, scheme: str = "light") -> Seen:
    """Open the page at `path`. The picture, and the browser's own files, are beside it. Fails where
    a process of the browser runs on afterwards (and ends it)."""
    program = find_browser()
    mark = uuid.uuid4().hex
    picture = path.with_name(f"{path.stem}-{width}-{scheme}.png")
    try:
        done = subprocess.run(
            [
                program,
                *FLAGS,
                f"--user-data-dir={path.with_name(f'profile-{mark[:8]}')}",
                f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
                f"--window-size={width},2600",
                f"--screenshot={picture}",
                "--dump-dom",
                path.as_uri(),
            ],
            env={**os.environ, _MARK: mark},
            capture_output=True,
            encoding="utf-8",
            timeout=120,
            check=False,
        )
    finally:
        left = _end(mark)
    assert not left, f"browser processes had to be ended: {left}"
    assert done.returncode == 0 and picture.is_file(), done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Seen(Dom(done.stdout), picture, console)
