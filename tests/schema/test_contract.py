"""Contracts: frozen, found by name only, and another contract as soon as one field differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

import schema
from schema import CONTRACTS, DEFAULT_CONTRACT, TrueOnPolicyContract, get_contract, split_bound_name

V1 = "qwen3_dense_true_on_policy_v1"
V2 = "qwen3_dense_true_on_policy_v2"


def test_registry_holds_the_two_contracts_by_their_names() -> None:
    assert list(CONTRACTS) == [V1, V2]
    assert all(contract.name == name for name, contract in CONTRACTS.items())
    assert DEFAULT_CONTRACT == V2


def test_registry_is_read_only() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        CONTRACTS["other"] = CONTRACTS[V1]  # type: ignore[index]
    with pytest.raises(TypeError, match="does not support item deletion"):
        del CONTRACTS[V1]  # type: ignore[attr-defined]
    assert list(CONTRACTS) == [V1, V2]


def test_get_contract_lists_the_choices() -> None:
    assert get_contract(V1) is CONTRACTS[V1]
    with pytest.raises(ValueError, match=f"unknown contract 'v1'; choose one of: {V1}, {V2}"):
        get_contract("v1")


def parts(contract: TrueOnPolicyContract) -> Iterator[tuple[str, Any]]:
    """The contract itself ("") and each of its rules, by field name."""
    yield "", contract
    for field in dataclasses.fields(contract):
        value = getattr(contract, field.name)
        if dataclasses.is_dataclass(value):
            yield field.name, value


FIELDS = [
    pytest.param(name, rule, field, id=f"{name}:{rule or 'contract'}.{field.name}")
    for name, contract in CONTRACTS.items()
    for rule, part in parts(contract)
    for field in dataclasses.fields(part)
    if not dataclasses.is_dataclass(getattr(part, field.name))
]


@pytest.mark.parametrize(("name", "rule", "field"), FIELDS)
def test_no_field_can_be_assigned(name: str, rule: str, field: dataclasses.Field[Any]) -> None:
    contract = CONTRACTS[name]
    part = getattr(contract, rule) if rule else contract
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(part, field.name, getattr(part, field.name))


def test_contracts_take_no_new_attributes() -> None:
    """Slots: a misspelt field is an error and not a silent extra."""
    with pytest.raises((AttributeError, TypeError)):
        object.__setattr__(CONTRACTS[V1], "tiel", 128)


def another(value: object) -> object:
    """A value of the same kind that is not this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, tuple):
        return (*value, "another")
    assert isinstance(value, str)
    return value + "x"


@pytest.mark.parametrize(("name", "rule", "field"), FIELDS)
def test_digest_changes_with_every_field(
    name: str, rule: str, field: dataclasses.Field[Any]
) -> None:
    contract = CONTRACTS[name]
    part = getattr(contract, rule) if rule else contract
    changed = dataclasses.replace(part, **{field.name: another(getattr(part, field.name))})
    edited = dataclasses.replace(contract, **{rule: changed}) if rule else changed
    assert edited.digest() != contract.digest()
    assert len(contract.digest()) == 64


def test_digest_depends_on_the_values_alone() -> None:
    copy = dataclasses.replace(CONTRACTS[V2])
    assert copy is not CONTRACTS[V2]
    assert copy.digest() == CONTRACTS[V2].digest()
    assert CONTRACTS[V1].digest() != CONTRACTS[V2].digest()


def test_what_the_specification_says() -> None:
    """NUMERICS.md, sections 1 and 2, in numbers."""
    v1, v2 = CONTRACTS[V1], CONTRACTS[V2]
    assert (v1.row_linear.tile, v1.row_linear.leaf_dtype, v1.row_linear.bias) == (
        128,
        "bfloat16",
        "rank0",
    )
    assert (v2.row_linear.max_segments, v2.row_linear.leaf_dtype, v2.row_linear.bias) == (
        8,
        "float32",
        "root",
    )
    assert (v1.logprob.order, v1.logprob.dtype) == ("gather", "float32")
    assert (v2.logprob.order, v2.logprob.num_segments, v2.logprob.segment_multiple) == (
        "segments",
        8,
        64,
    )
    for contract in (v1, v2):
        assert contract.norm.residual_dtype == contract.norm.weight_dtype == "float32"
        assert contract.rope.table_dtype == "float32"
        assert not contract.rope.fused_multiply_add
        assert contract.attention.num_splits == 1
        assert "qwen3_dense" in contract.families
        assert not any("moe" in family for family in contract.families)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (V1, (V1, None)),
        (V2, (V2, None)),
        (f"{V2}:segments=1", (V2, 1)),
        (f"{V2}:segments=8", (V2, 8)),
    ],
)
def test_split_bound_name(text: str, expected: tuple[str, int | None]) -> None:
    assert split_bound_name(text) == expected


@pytest.mark.parametrize(
    "tail", ["", "segments", "segments=", "segments=two", "segments=-8", "segments=8.0", "s=8"]
)
def test_split_bound_name_refuses_any_other_tail(tail: str) -> None:
    with pytest.raises(ValueError, match="write NAME or NAME:segments=S") as caught:
        split_bound_name(f"{V2}:{tail}")
    assert repr(f"{V2}:{tail}") in str(caught.value)


@pytest.mark.parametrize("text", ["", "qwen3:segments=8", f" {V2}", f"{V2}=segments"])
def test_split_bound_name_refuses_an_unknown_name(text: str) -> None:
    with pytest.raises(ValueError, match=f"choose one of: {V1}, {V2}"):
        split_bound_name(text)


def test_public_names_are_what_they_claim() -> None:
    assert len(set(schema.__all__)) == len(schema.__all__)
    assert all(hasattr(schema, name) for name in schema.__all__)
