"""The form of `bisect.json` that a page is made of: `check` says what is not so, by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .floats import FORMATS

Form = Callable[[Any, str], None]

# Only a run that came to its end has these for certain.
_COMPLETE = ("between", "first_divergence", "ops", "tokens", "prompt_lengths", "heat", "ulp")


def _wrong(name: str, expected: str, found: Any) -> ValueError:
    shown = repr(found)
    return ValueError(f"{name}: expected {expected}, found {shown[:60]}")


def _is(kinds: type | tuple[type, ...], expected: str, least: float | None = None) -> Form:
    def form(found: Any, name: str) -> None:
        # True is an int to Python, and no count.
        if (isinstance(found, bool) and kinds is not bool) or not isinstance(found, kinds):
            raise _wrong(name, expected, found)
        if least is not None and isinstance(found, int | float) and found < least:
            raise _wrong(name, expected, found)

    return form


def _or_null(inner: Form) -> Form:
    return lambda found, name: None if found is None else inner(found, name)


def _list(inner: Form, length: int | None = None) -> Form:
    def form(found: Any, name: str) -> None:
        if not isinstance(found, list | tuple) or (length is not None and len(found) != length):
            raise _wrong(name, "a list" if length is None else f"a list of {length}", found)
        for number, item in enumerate(found):
            inner(item, f"{name}[{number}]")

    return form


def _mapping(inner: Form) -> Form:
    def form(found: Any, name: str) -> None:
        if not isinstance(found, Mapping):
            raise _wrong(name, "an object", found)
        for key, item in found.items():
            inner(item, f"{name}.{key}")

    return form


def _record(**members: Form) -> Form:
    def form(found: Any, name: str) -> None:
        if not isinstance(found, Mapping):
            raise _wrong(name, "an object", found)
        for key, inner in members.items():
            if key not in found:
                raise ValueError(f"{name}.{key}: missing")
            inner(found[key], f"{name}.{key}")

    return form


def _any(found: Any, name: str) -> None:
    pass


_text = _is(str, "a string")
_flag = _is(bool, "true or false")
_count = _is(int, "a number from 0", 0)
_scalar = _or_null(_is((str, int, float), "a scalar"))
_layer = _or_null(_count)
_place: dict[str, Form] = {"layer": _layer, "op": _text, "tensor": _text}


def _heat_layer(found: Any, name: str) -> None:
    if found not in ("embedding", "head"):
        _count(found, name)


def _divergence(sides: Sequence[str]) -> Form:
    def each(inner: Form) -> Form:
        return _record(**dict.fromkeys(sides, inner))

    return _record(
        **_place,
        side=_or_null(_text),
        rank=_or_null(_count),
        judged_by=_or_null(_text),
        token=_record(sequence=_count, position=_count, id=_count, part=_text),
        token_rows_differ=_count,
        token_rows_compared=_count,
        inputs_equal=_flag,
        inputs=_list(_record(**_place, equal=_flag)),
        bits=_or_null(each(_text)),
        ulp=_or_null(_count),
        element=_or_null(
            _record(column=_count, dtype=_text, ranks=each(_count), differ=_count, of=_count)
        ),
        look_at=_record(policy=_mapping(_any), **dict.fromkeys(sides, _mapping(_any))),
    )


def _members(sides: Sequence[str]) -> dict[str, Form]:
    return {
        "model": _scalar,
        "contract": _scalar,
        "segments": _scalar,
        "device": _scalar,
        "layout": _record(rollout_tp=_count, train_tp=_count, pp=_count, cp=_count),
        "versions": _mapping(_scalar),
        "fingerprint": _mapping(_mapping(_any)),
        "seconds": _mapping(_is((int, float), "seconds", 0)),
        "ended": _text,
        "message": _text,
        "exit_code": _is(int, "a number"),
        "between": _list(_text, 2),
        "first_divergence": _or_null(_divergence(sides)),
        "ops": _list(_record(**_place, rows=_count, differ=_count)),
        "tokens": _list(_list(_count)),
        "prompt_lengths": _list(_count),
        "heat": _or_null(
            _record(
                layers=_list(_heat_layer),
                tokens=_list(_list(_count, 2)),
                rows_differ=_list(_list(_count)),
                elements_differ=_list(_or_null(_list(_count))),
            )
        ),
        "ulp": _or_null(
            _record(
                **_place,
                rows=_count,
                elements=_count,
                differ=_count,
                not_numbers=_count,
                buckets=_list(_list(_count, 3)),
            )
        ),
    }


def check(data: Mapping[str, Any]) -> None:
    """Raise `ValueError` naming the first part that is missing, ill-formed, or that says something
    else than another part."""
    if not isinstance(data, Mapping):
        raise _wrong("data", "an object", data)
    complete = data.get("ended") == "complete"
    for name, form in _members(sides_of(data)).items():
        if name in data:
            form(data[name], name)
        elif complete or name not in _COMPLETE:
            raise ValueError(f"{name}: missing")
    _agree(data, complete)


def sides_of(data: Mapping[str, Any]) -> tuple[str, str]:
    """The two names in `between`; of a run that did not get so far, rollout and trainer."""
    found = data.get("between", ("rollout", "trainer"))
    _list(_text, 2)(found, "between")
    if found[0] == found[1]:
        raise _wrong("between", "two different sides", found)
    return found[0], found[1]


def _agree(data: Mapping[str, Any], complete: bool) -> None:
    ops, first = data.get("ops", ()), data.get("first_divergence")
    for number, op in enumerate(ops):
        if op["differ"] > op["rows"]:
            raise _wrong(f"ops[{number}].differ", f"at most {op['rows']}", op["differ"])
    if len(data.get("tokens", ())) != len(data.get("prompt_lengths", ())):
        raise ValueError("prompt_lengths: not one for each sequence of tokens")
    if complete and first is None:
        # An equality that something in the data speaks against must not be drawn as one.
        wrong = [op for op in ops if op["differ"]]
        if wrong or not ops or data["exit_code"] != 0:
            why = f"{len(wrong)} of {len(ops)} ops differ, exit code {data['exit_code']}"
            raise ValueError(f"first_divergence: null, and yet {why}")
    if first is not None:
        _agree_first(first, ops)
    if data.get("heat") is not None:
        _agree_heat(data["heat"])
    if data.get("ulp") is not None:
        edges = [edge for low, high, _ in data["ulp"]["buckets"] for edge in (low, high)]
        if edges != sorted(edges) or any(
            high >= low for high, low in zip(edges[1::2], edges[2::2], strict=False)
        ):
            raise _wrong("ulp.buckets", "[first, last, count] in order, none overlapping", edges)


def _agree_first(first: Mapping[str, Any], ops: Sequence[Mapping[str, Any]]) -> None:
    place = tuple(first[key] for key in _place)
    if ops and not any(tuple(op[key] for key in _place) == place for op in ops):
        raise _wrong("first_divergence", "a place that is in ops", place)
    if first["bits"] is None:
        return
    if first["element"] is None:
        raise ValueError("first_divergence.element: null beside bits")
    dtype = first["element"]["dtype"]
    form = FORMATS.get(dtype)
    for side, digits in first["bits"].items():
        name = f"first_divergence.bits.{side}"
        if not re.fullmatch(r"[0-9a-fA-F]+", digits):
            raise _wrong(name, "hexadecimal digits", digits)
        if form is not None and len(digits) != form.bits // 4:
            raise _wrong(name, f"{form.bits // 4} digits of {dtype}", digits)


def _agree_heat(heat: Mapping[str, Any]) -> None:
    tokens, layers = len(heat["tokens"]), len(heat["layers"])
    for name in ("rows_differ", "elements_differ"):
        rows = heat[name]
        if len(rows) != tokens or any(row is not None and len(row) != layers for row in rows):
            raise ValueError(f"heat.{name}: not {tokens} tokens of {layers} layers")
