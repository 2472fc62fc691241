"""Frozen dataclasses to plain JSON values and back, exactly.

The reader is strict: an unknown key, a missing key or a value of another type is a `ValueError`
that names the place, so that a hand-edited plan cannot be half understood.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def to_data(value: Any) -> Any:
    """Dataclasses become dicts and tuples become lists; everything else is kept as it is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_data(item) for item in value]
    if isinstance(value, dict):
        return {key: to_data(item) for key, item in value.items()}
    assert value is None or isinstance(value, (bool, int, float, str)), type(value)
    return value


def from_data(kind: type[T], data: Any, where: str = "") -> T:
    """Build the dataclass `kind` from plain values; `where` names the place in error messages."""
    if not isinstance(data, dict):
        raise ValueError(f"{where or kind.__name__}: expected an object, got {data!r}")
    hints = _hints(kind)
    unknown = [key for key in data if key not in hints]
    missing = [key for key in hints if key not in data]
    if unknown or missing:
        raise ValueError(
            f"{where or kind.__name__}: unknown keys {unknown}, missing keys {missing}"
        )
    values = {
        key: _value(hint, data[key], f"{where}.{key}" if where else key)
        for key, hint in hints.items()
    }
    return kind(**values)


def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _value(hint: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return data
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return from_data(hint, data, where)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        others = [a for a in arguments if a is not type(None)]
        assert len(others) == 1, f"{where}: one alternative beside None, got {hint}"
        return _value(others[0], data, where)
    if origin is typing.Literal:
        if data not in arguments:
            raise ValueError(f"{where}: {data!r} is not one of {list(arguments)}")
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise ValueError(f"{where}: expected a list, got {data!r}")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_value(arguments[0], x, f"{where}[{i}]") for i, x in enumerate(data))
        if len(arguments) != len(data):
            raise ValueError(f"{where}: expected {len(arguments)} values, got {data!r}")
        return tuple(
            _value(a, x, f"{where}[{i}]")
            for i, (a, x) in enumerate(zip(arguments, data, strict=True))
        )
    if origin is dict:
        if not isinstance(data, dict):
            raise ValueError(f"{where}: expected an object, got {data!r}")
        return {key: _value(arguments[1], x, f"{where}.{key}") for key, x in data.items()}
    assert isinstance(hint, type), hint
    # bool is an int in Python; a plan that says true where a count belongs is a mistake.
    if not isinstance(data, hint) or (isinstance(data, bool) and hint is not bool):
        if hint is float and isinstance(data, int) and not isinstance(data, bool):
            return float(data)
        raise ValueError(f"{where}: expected {hint.__name__}, got {data!r}")
    return data
