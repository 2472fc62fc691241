"""The head of the page, the end of it, and what was found in one word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .form import sides_of
from .markup import Markup, join, tag
from .words import OUTPUT, counted, facts, icon, number, place

EQUAL, DIVERGENCE, NOT_SHOWN = "equal", "divergence", "not-shown"
_BADGES = {
    EQUAL: ("check", "equal"),
    DIVERGENCE: ("differ", "first divergence"),
    NOT_SHOWN: ("unknown", "not shown"),
}
_LAYOUT = {"rollout_tp": "rollout TP", "train_tp": "trainer TP", "pp": "PP", "cp": "CP"}


def status(data: Mapping[str, Any]) -> str:
    """Equal only where the run came to its end; a divergence that was found stays one."""
    if data.get("first_divergence") is not None:
        return DIVERGENCE
    return EQUAL if data["ended"] == "complete" else NOT_SHOWN


def verdict(first: Mapping[str, Any]) -> str:
    """Where to look: the op, what carries the data to it, or what stands before it."""
    op, inputs = first["op"], first["inputs"]
    names = [place(item["layer"], item["op"], item["tensor"]) for item in inputs]
    wrong = [name for name, item in zip(names, inputs, strict=True) if not item["equal"]]
    if wrong:
        return f"{', '.join(wrong)} differ{'s' if len(wrong) == 1 else ''} too: look there first."
    if first["tensor"] != OUTPUT:
        made = " and ".join(names) or "What it is made of"
        verb = "are" if len(names) > 1 else "is"
        return f"{made} {verb} equal: what carries the data into {op} is at fault."
    if not first["inputs_equal"]:
        return f"The inputs of {op} are not equal: look at what they come from."
    read = "Its inputs are equal" if inputs else "Nothing before it differs"
    return f"{read}, its output is not: {op} is at fault."


def headline(data: Mapping[str, Any]) -> Markup:
    """Badge, title, what to conclude, the sentence, and what ran."""
    state = status(data)
    sign, word = _BADGES[state]
    badge = tag("span", icon(sign), word, class_=f"badge {state}")
    ours, theirs = sides_of(data)
    lead: str | None
    if state == DIVERGENCE:
        first = data["first_divergence"]
        title = place(first["layer"], first["op"], first["tensor"])
        lead = verdict(first)
    elif state == EQUAL:
        title, lead = "Equal, bit for bit", f"No token row differs between {ours} and {theirs}."
    else:
        title = "Nothing was shown equal"
        lead = f"The run did not come to its end: {data['ended']} (exit code {data['exit_code']})."
    if state == DIVERGENCE and data["ended"] != "complete":
        lead = f"{lead} The run then did not come to its end: {data['ended']}."
    return tag(
        "header",
        tag("p", badge, tag("span", "miles bisect", class_="tool"), class_="eyebrow"),
        tag("h1", title),
        tag("p", lead, class_="lead"),
        tag("p", data["message"], class_="sentence"),
        _about(data, f"{ours} against {theirs}"),
        class_=f"top {state}",
    )


def _about(data: Mapping[str, Any], compared: str) -> Markup:
    layout = " · ".join(f"{name} {data['layout'][key]}" for key, name in _LAYOUT.items())
    versions = [
        tag("span", name, " ", tag("b", str(found)), class_="chip")
        for name, found in data["versions"].items()
    ]
    return facts(
        [
            ("compared", compared),
            ("model", str(data["model"])),
            ("contract", str(data["contract"])),
            ("layout", layout),
            ("segments", str(data["segments"])),
            ("device", str(data["device"])),
            ("versions", join(versions) if versions else "not given"),
        ]
    )


def page_title(data: Mapping[str, Any]) -> str:
    """The name of the browser's tab."""
    first = data.get("first_divergence")
    found = _BADGES[status(data)][1]
    if first is not None:
        found += f": {place(first['layer'], first['op'], first['tensor'])}"
    return f"{found} · {data['model']} · miles bisect"


def footer(data: Mapping[str, Any]) -> Markup:
    """How long each phase took, and how much was compared."""
    ops, tokens = data.get("ops", ()), data.get("tokens", ())
    rows = sum(op["rows"] for op in ops)
    if ops:
        tapped = counted(len(ops), "tapped tensor")
        text = f"{counted(rows, 'token row')} of {tapped} compared; "
        text += f"{number(sum(map(len, tokens)))} tokens of {counted(len(tokens), 'sequence')}"
    else:
        text = "no token row was compared"
    seconds = data["seconds"]
    most, total = max(seconds.values(), default=0), sum(seconds.values())
    phases = [
        tag(
            "li",
            tag("span", name),
            tag("b", f"{spent:.1f} s" if spent >= 0.05 else f"{1000 * spent:.0f} ms"),
            style=f"--part:{100 * spent / most if most else 0:.1f}%",
        )
        for name, spent in seconds.items()
    ]
    return tag(
        "footer",
        tag("p", tag("b", text)),
        tag("p", f"{total:.1f} s in {counted(len(seconds), 'phase')}") if seconds else None,
        tag("ol", phases, class_="phases") if phases else None,
    )
