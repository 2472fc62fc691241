"""`bisect.html` as text: what it says, what it escapes, and what data it refuses."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from page_browser import Dom
from page_cases import CASES, HOSTILE, Data, decode_prefill, divergence, equal, hostile, pages

from miles_launcher.parity.page import floats, page


@pytest.mark.parametrize(
    ("digits", "dtype", "fields", "decimal"),
    [
        ("3f9a", "bfloat16", ("0", "01111111", "0011010"), "1.203125"),
        ("bf80", "bfloat16", ("1", "01111111", "0000000"), "-1"),
        ("0001", "bfloat16", ("0", "00000000", "0000001"), "9.18354962e-41"),
        ("7fc0", "bfloat16", ("0", "11111111", "1000000"), "NaN (not a number)"),
        ("3dcccccd", "float32", ("0", "01111011", "10011001100110011001101"), "0.100000001"),
        ("ff800000", "float32", ("1", "11111111", "0" * 23), "-infinity"),
        ("80000000", "float32", ("1", "0" * 8, "0" * 23), "-0"),
        ("3c01", "float16", ("0", "01111", "0000000001"), "1.00097656"),
        ("3ff0000000000001", "float64", ("0", "01111111111", "0" * 51 + "1"), "1.0000000000000002"),
    ],
)
def test_bits_are_taken_apart(
    digits: str, dtype: str, fields: tuple[str, str, str], decimal: str
) -> None:
    assert floats.fields(digits, dtype) == fields
    assert floats.decimal(floats.value(digits, dtype), dtype) == decimal


def test_neighbours_never_print_alike() -> None:
    """Every pair of adjacent finite bfloat16 numbers has two different decimals."""
    texts = [
        floats.decimal(floats.value(f"{n:04x}", "bfloat16"), "bfloat16") for n in range(0x7F80)
    ]
    assert all(a != b for a, b in pairwise(texts))


@pytest.mark.parametrize("case", CASES)
def test_the_page_stands_alone(case: str, tmp_path: Path) -> None:
    """Nothing in it is fetched from anywhere; it is written whole, and alone in its folder."""
    path = pages(tmp_path, CASES[case]())
    text = path.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [path]
    dom = Dom(text)
    assert not {"src", "href", "action"} & {key for _, found in dom.tags for key in found}
    assert not {"img", "link", "iframe", "object", "base"} & {tag for tag, _ in dom.tags}
    assert not re.search(r"url\(|@import|\bfetch\(|XMLHttpRequest|import\(", text)
    assert path.stat().st_size < 3_000_000
    ids = [found["id"] for _, found in dom.tags if "id" in found]
    assert len(ids) == len(set(ids))


def test_a_model_of_64_layers_and_every_element_counted_stays_small(tmp_path: Path) -> None:
    data = divergence(layer=2, layers=64, sequences=16, length=257, position=30)
    data["heat"]["elements_differ"] = [[2560] * 66 for _ in data["heat"]["tokens"]]
    data["heat"]["rows_differ"] = [[26] * 66 for _ in data["heat"]["tokens"]]
    assert pages(tmp_path, data).stat().st_size < 3_000_000


def test_every_value_is_escaped(tmp_path: Path) -> None:
    text = pages(tmp_path, hostile()).read_text(encoding="utf-8")
    assert "<img" not in text and "<script>document" not in text
    assert text.count("<script") == text.count("</script>") == 2
    assert HOSTILE[:-1] in Dom(text).text, "and it is still to be read"


def without(name: str) -> Callable[[Data], None]:
    def change(data: Data) -> None:
        *path, last = name.split(".")
        for key in path:
            data = data[key]
        del data[last]

    return change


def put(name: str, value: Any) -> Callable[[Data], None]:
    def change(data: Data) -> None:
        *path, last = [int(key) if key.isdecimal() else key for key in name.split(".")]
        found: Any = data
        for key in path:
            found = found[key]
        found[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *((without(name), f"{name}: missing") for name in equal()),
        (without("layout.pp"), "layout.pp: missing"),
        (without("first_divergence.token.id"), "first_divergence.token.id: missing"),
        (without("first_divergence.look_at.trainer"), "first_divergence.look_at.trainer: missing"),
        (without("first_divergence.bits.rollout"), "first_divergence.bits.rollout: missing"),
        (without("heat.elements_differ"), "heat.elements_differ: missing"),
        (put("ops.3.rows", "many"), r"ops\[3\].rows: expected a number from 0, found 'many'"),
        (put("ops.3.rows", True), r"ops\[3\].rows: expected a number from 0, found True"),
        (put("ops.3.differ", 10**9), r"ops\[3\].differ: expected at most 376"),
        (
            put("first_divergence.bits.trainer", "3f9"),
            "bits.trainer: expected 4 digits of bfloat16",
        ),
        (put("first_divergence.bits.trainer", "3f9g"), "bits.trainer: expected hexadecimal digits"),
        (put("first_divergence.element", None), "element: null beside bits"),
        (put("first_divergence.op", "gate"), "first_divergence: expected a place that is in ops"),
        (put("first_divergence", None), "null, and yet 64 of 112 ops differ, exit code 3"),
        (put("between", ["rollout", "rollout"]), "between: expected two different sides"),
        (put("prompt_lengths", [1]), "prompt_lengths: not one for each sequence"),
        (put("heat.layers.0", "head of it"), r"heat.layers\[0\]: expected a number from 0"),
        (put("heat.rows_differ.5", [0]), "heat.rows_differ: not 376 tokens of 6 layers"),
        (put("ulp.buckets", [[1, 2, 5], [2, 4, 1]]), "ulp.buckets: expected .* none overlapping"),
        (put("seconds.ray", -1), "seconds.ray: expected seconds, found -1"),
        (put("exit_code", None), "exit_code: expected a number, found None"),
    ],
)
def test_ill_formed_data_is_refused_by_name(
    change: Callable[[Data], None], said: str, tmp_path: Path
) -> None:
    data = divergence()
    change(data)
    with pytest.raises(ValueError, match=said):
        pages(tmp_path, data)
    assert not list(tmp_path.iterdir())


def test_equal_needs_the_end_of_the_run() -> None:
    """Data that would be a page of equality, were the run not one that ended early."""
    data = equal()
    data.update(ended="interrupted", exit_code=130)
    text = Dom(page(data)).text
    assert "Nothing was shown equal" in text and "interrupted (exit code 130)" in text
    assert "Equal, bit for bit" not in text and "all 112 tapped tensors equal" in text
    data.update(ended="complete")
    with pytest.raises(ValueError, match="0 of 112 ops differ, exit code 130"):
        page(data)


def test_the_conclusion_follows_from_the_inputs() -> None:
    def lead(**change: Any) -> str:
        data = divergence()
        data["first_divergence"].update(change)
        return Dom(page(data)).text

    source = {"layer": 1, "op": "gate_up_proj", "tensor": "input"}
    assert "Its inputs are equal, its output is not: gate_up_proj is at fault." in lead()
    assert "Nothing before it differs, its output is not: gate_up_proj is at" in lead(inputs=[])
    unequal = lead(inputs_equal=False, inputs=[{**source, "equal": False}])
    assert "input of layer 1 gate_up_proj differs too: look there first." in unequal
    assert "is at fault." not in unequal
    carried = Dom(page(decode_prefill())).text
    assert "layer 2 attention is equal: what carries the data into o_proj is at fault." in carried
    assert "decode against prefill" in carried and "The row itself was not stored" in carried


def test_what_differs_in_the_fingerprints_comes_first() -> None:
    data = divergence()
    data["fingerprint"]["trainer"]["versions"]["triton"] = "3.6.1"
    data["fingerprint"]["trainer"]["segments"] = 2.0
    text = page(data)
    other, _, same = text[text.index('id="fingerprints"') :].partition("<details")
    assert "2 of 11 keys differ" in other and "9 equal keys" in same
    assert ">versions.triton</th>" in other and "3.6.<mark>1</mark>" in other
    assert ">segments</th>" in other, "a whole number is not a fraction"
    assert ">versions.torch</th>" in same and ">versions.torch</th>" not in other
    data["fingerprint"] = {"rollout": data["fingerprint"]["rollout"]}
    assert "trainer gave no fingerprint before the run ended" in Dom(page(data)).text


def test_distances_have_buckets_and_what_is_no_number_a_row() -> None:
    data = divergence()
    data["ulp"]["buckets"] += [[64, 127, 0], [128, 2**20 - 1, 0]]
    text = Dom(page(data)).text
    for label in ("4 to 7", "32 to 63", "not a number", "161 of 36,864 elements"):
        assert label in text
    assert "64 to 127" not in text, "empty ends are left out"


def test_an_install_has_style_and_script() -> None:
    package = "miles_launcher.parity.page"
    folder = Path(__file__).resolve().parents[2] / "miles_launcher"
    settings = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = {p.name for p in (folder / "parity" / "page").iterdir() if p.is_file()}
    patterns = settings["package-data"][package]
    assets = {name for name in files if not name.endswith((".py", ".pyc"))}
    assert assets == {"page.css", "page.js"} == set(patterns)
