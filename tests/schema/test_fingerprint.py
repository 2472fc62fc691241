"""The fingerprint: every input of the numbers is in it, and a difference is named."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schema import CONTRACTS, DEFAULT_CONTRACT, Fingerprint
from schema.fingerprint import text_digest


def fingerprint(**changes: Any) -> Fingerprint:
    values: dict[str, Any] = {
        "contract": DEFAULT_CONTRACT,
        "contract_digest": CONTRACTS[DEFAULT_CONTRACT].digest(),
        "segments": 8,
        "rollout_tensor_parallel_size": 2,
        "schema_digest": "a" * 64,
        "ops_digest": "b" * 64,
        "rope_digest": "c" * 64,
        "attention": "reference",
        "device": "cpu",
        "versions": (("torch", "2.11.0"), ("triton", "3.6.0")),
    }
    return Fingerprint(**{**values, **changes})


# One field each, so that a new field without an entry here fails below.
CHANGES: dict[str, Any] = {
    "contract": "another",
    "contract_digest": "0" * 64,
    "segments": 4,
    "rollout_tensor_parallel_size": 1,
    "schema_digest": "0" * 64,
    "ops_digest": "0" * 64,
    "rope_digest": "0" * 64,
    "attention": "triton",
    "device": "NVIDIA H200",
    "versions": (("torch", "2.11.1"), ("triton", "3.6.0")),
}


def test_every_field_is_tried() -> None:
    assert list(CHANGES) == [field.name for field in dataclasses.fields(Fingerprint)]


@pytest.mark.parametrize("name", CHANGES)
def test_one_changed_field_changes_the_digest_and_is_named(name: str) -> None:
    mine, theirs = fingerprint(), fingerprint(**{name: CHANGES[name]})
    assert mine.digest() != theirs.digest()
    (line,) = mine.differences(theirs)
    assert line.startswith(f"{name}: ")
    assert repr(getattr(mine, name)) in line
    assert repr(CHANGES[name]) in line


def test_equal_fields_are_an_equal_fingerprint() -> None:
    mine, theirs = fingerprint(), fingerprint()
    assert mine is not theirs
    assert mine.digest() == theirs.digest()
    assert mine.differences(theirs) == []


def test_all_differences_are_listed_at_once() -> None:
    lines = fingerprint().differences(fingerprint(**CHANGES))
    assert [line.partition(":")[0] for line in lines] == list(CHANGES)


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        fingerprint().segments = 1  # type: ignore[misc]


def test_to_dict_is_plain_json_and_carries_the_digest() -> None:
    mine = fingerprint()
    values = mine.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["digest"] == mine.digest()
    assert values["versions"] == {"torch": "2.11.0", "triton": "3.6.0"}
    assert set(values) == {"digest", *CHANGES}


FILES = st.dictionaries(
    st.text("ab/._", min_size=1, max_size=4), st.binary(max_size=4), min_size=1, max_size=4
)


@given(files=FILES)
def test_text_digest_does_not_depend_on_the_order_given(files: dict[str, bytes]) -> None:
    assert text_digest(dict(reversed(files.items()))) == text_digest(files)


@given(first=FILES, second=FILES)
def test_text_digest_tells_any_two_sets_of_files_apart(
    first: dict[str, bytes], second: dict[str, bytes]
) -> None:
    assert (text_digest(first) == text_digest(second)) == (first == second)


def test_text_digest_keeps_names_and_contents_apart() -> None:
    """Moving bytes over a file's border gives another digest though the concatenation is equal."""
    assert text_digest({"a": b"bc", "d": b""}) != text_digest({"a": b"b", "d": b"c"})
    assert text_digest({"a": b"1"}) != text_digest({"b": b"1"})
    assert text_digest({"a": b"1"}) != text_digest({"a": b"1", "b": b""})
