"""`bisect.html` in a real browser: what its script draws, and what a hand and an eye find."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
from page_browser import Seen, find_browser, look
from page_cases import CASES, divergence, large, pages, strip_states
from PIL import Image

View = Callable[..., Seen]

# Reads what only a laid-out page knows, and does what a reader's hand would.
PROBE = """
const probe = { width: innerWidth, scroll: document.documentElement.scrollWidth };
const line = (name) => document.querySelector(`#${name} .readout`).textContent;
const key = (on, key) => on.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const marked = document.querySelector("#strip .cell.first");
if (marked) {
  const box = marked.getBoundingClientRect();
  probe.first = [box.width, box.height];
  marked.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  probe.hovered = line("strip");
  marked.focus();
  key(marked, "ArrowRight");
  probe.stepped = document.activeElement.title;
  const canvas = document.querySelector("#heat canvas");
  const at = canvas.getBoundingClientRect();
  const point = { clientX: at.left + 80, clientY: at.top + 30, bubbles: true };
  canvas.dispatchEvent(new PointerEvent("pointermove", point));
  probe.pointed = line("heat");
  canvas.dispatchEvent(new PointerEvent("pointerleave"));
  key(canvas, "ArrowDown");
  probe.heat = line("heat");
  key(canvas, "ArrowDown");
  probe.below = line("heat");
  const { sequence, measure } = document.querySelector("#heat form").elements;
  probe.choices = [sequence.length, measure.parentElement.hidden];
  sequence.value = "1";
  measure.value = "tensors";
  const start = performance.now();
  sequence.form.dispatchEvent(new Event("change"));
  probe.one = document.documentElement.dataset.heat;
  sequence.value = "";
  measure.value = "elements";
  sequence.form.dispatchEvent(new Event("change"));
  probe.milliseconds = performance.now() - start;
}
document.documentElement.dataset.probe = JSON.stringify(probe);
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> View:
    """`seen(case, width, scheme)`: a page with the probe in it; each is opened once."""
    find_browser()

    @functools.cache
    def view(case: str, width: int, scheme: str) -> Seen:
        folder = tmp_path_factory.mktemp(f"{case}-{width}-{scheme}")
        return look(probed(pages(folder, CASES[case]())), width, scheme)

    return lambda case, width=1400, scheme="light": view(case, width, scheme)


def probed(path: Path) -> Path:
    """The page with `PROBE` at its end, which the page's policy is told to let run."""
    digest = base64.b64encode(hashlib.sha256(PROBE.encode()).digest()).decode()
    text = path.read_text(encoding="utf-8")
    assert text.count("script-src &#x27;sha256-") == 1
    text = text.replace("script-src ", f"script-src 'sha256-{digest}' ")
    copy = path.with_name("probed.html")
    copy.write_text(text.replace("</body>", f"<script>{PROBE}</script></body>"), encoding="utf-8")
    return copy


def colours(name: str) -> dict[str, str]:
    """A colour of page.css in both schemes."""
    text = resources.files("miles_launcher.parity.page").joinpath("page.css").read_text()
    return dict(zip(("light", "dark"), re.findall(rf"--{name}: (#\w+)", text), strict=True))


def test_the_script_runs_and_no_other_one(tmp_path: Path) -> None:
    """The page as it is written; then the same page with a stranger's script, which is refused and
    shows that a line on the console would not be missed."""
    path = pages(tmp_path, divergence())
    found = look(path)
    assert found.root["data-drawn"] == "yes" and found.root["data-heat"] == "376 by 6"
    assert not found.console
    stranger = tmp_path / "stranger.html"
    text = path.read_text().replace("</main>", "</main><script>document.title='owned'</script>")
    stranger.write_text(text)
    found = look(stranger)
    assert "Content Security Policy" in " ".join(found.console)
    assert "owned" not in found.dom.text.split("miles bisect")[0]


VIEWS = [(case, *view) for case in CASES for view in ((1400, "light"), (800, "dark"))]
VIEWS += [("divergence", 1400, "dark"), ("divergence", 800, "light")]


@pytest.mark.parametrize(("case", "width", "scheme"), VIEWS)
def test_every_page_is_drawn(case: str, width: int, scheme: str, seen: View) -> None:
    data = CASES[case]()
    found = seen(case, width, scheme)
    assert not found.console
    assert found.root["data-drawn"] == "yes"
    assert found.probe["width"] == width
    assert found.probe["scroll"] <= width, "nothing stands out at the side"
    with Image.open(found.picture) as image:
        assert image.width == width
        assert image.getpixel((1, 1))[:3] == tuple(bytes.fromhex(colours("paper")[scheme][1:]))
    states = Counter(cell["class"].split()[1] for cell in found.dom.of_class("cell"))
    first = data.get("first_divergence")
    assert states == (strip_states(data) if "ops" in data else Counter())
    if first is None:
        assert found.pixels(colours("first")[scheme]) == 0
        assert "data-heat" not in found.root and found.dom.count("canvas") == 0
        return
    assert found.pixels(colours("first")[scheme]) > 300
    marked = found.dom.of_class("cell", "first")
    rows = f"{first['token_rows_differ']:,} of {first['token_rows_compared']:,} token rows"
    assert len(marked) == 1 and f": first divergence, {rows} differ" in marked[0]["title"]
    assert min(found.probe["first"]) >= 5
    assert found.probe["hovered"] == marked[0]["title"]
    assert "differs after it" in found.probe["stepped"]


def test_a_page_without_a_divergence_says_so(seen: View) -> None:
    text = seen("equal").dom.text
    assert "Equal, bit for bit" in text and "No token row differs between rollout and" in text
    assert "No token differs in any layer: 384 tokens of 8 sequences." in text
    text = seen("unfinished").dom.text
    assert "Nothing was shown equal" in text and "trainer rank 1 died" in text
    assert "no token row was compared" in text and "ops_digest" in text


def test_the_bits_are_marked(seen: View) -> None:
    dom = seen("large").dom
    assert len(dom.of_class("bits", "wide-32")) == 1
    assert len(dom.of_class("odd")) == 2, "one bit on each side"
    for text in ("1.20324922", "-1.20324922", "2,134,116,388 ulp", "1 bit differs: the sign."):
        assert text in dom.text


def test_the_map_answers_to_pointer_keys_and_choices(seen: View) -> None:
    data = large()
    found = seen("large")
    sequence, position = (data["first_divergence"]["token"][k] for k in ("sequence", "position"))
    where = f"sequence {sequence} position {position}, token {data['tokens'][sequence][position]}"
    assert found.probe["pointed"].startswith("embedding, sequence 0 position 1")
    assert found.probe["heat"].startswith(f"layer 11, {where}, response: ")
    assert "; the first divergence" in found.probe["heat"]
    assert "tapped tensors differ in " in found.probe["heat"]
    assert found.probe["below"].startswith("layer 12, ")
    assert found.probe["choices"] == [17, False], "16 sequences or all; tokens without counts"
    assert found.probe["one"] == "256 by 38"
    assert found.probe["milliseconds"] < 2000
    # All tokens are there, several to a column.
    bins, layers = map(int, found.root["data-heat"].split(" by "))
    assert 1000 < bins <= 1400 and layers == 38


def test_what_was_not_counted_has_a_colour_of_its_own(seen: View) -> None:
    """Tokens whose elements were counted are not on one scale with those whose were not."""
    found = seen("large")
    most = {name: colours(name)["light"] for name in ("elements", "tensors")}
    assert set(most) == {"elements", "tensors"}
    for name in most:
        text = resources.files("miles_launcher.parity.page").joinpath("page.css").read_text()
        deepest = re.search(rf"--{name}: ([#\w ]+);", text)
        assert deepest is not None
        assert found.pixels(deepest[1].split()[-1]) > 50, name


def test_hostile_text_stays_text(seen: View) -> None:
    found = seen("hostile")
    assert not found.console
    assert found.dom.count("img") == 0 and found.dom.count("script") == 3
    assert found.dom.text.strip().startswith("first divergence: layer 1 </script>"), (
        "the title is its own"
    )
    assert found.root["data-drawn"] == "yes"
