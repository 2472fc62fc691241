"""Prompts from a JSONL file: one object a line, every complaint with file and line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FORMS = ("prompt", "prompt_ids", "messages")
_LABELS = ("label", "answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt in exactly one form: `text`, token `ids`, or chat `messages` (role, content).

    `label` is what the reward may compare with (any JSON value, or None); `metadata` holds the
    line's other keys. `source` says where it came from, for messages.
    """

    text: str | None = None
    ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def needs_tokenizer(self) -> bool:
        return self.ids is None


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """All prompts of a JSONL file (UTF-8), in order; blank lines are skipped.

    A line is `{"prompt": str}`, `{"prompt_ids": [int, ...]}` or `{"messages": [{"role", "content"},
    ...]}`, with an optional `label` (or `answer`). Raises `ValueError` with file and line for
    anything else, and for a file without prompts.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: cannot read the prompts ({error.strerror})") from None
    prompts = [
        _read_line(line, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise ValueError(f"{path}: no prompts in this file")
    return tuple(prompts)


def _read_line(line: bytes, where: str) -> Prompt:
    try:
        data = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object, got {type(data).__name__}")
    forms = [key for key in _FORMS if key in data]
    if len(forms) != 1:
        raise ValueError(
            f"{where}: give exactly one of {', '.join(_FORMS)}; found {forms or list(data)}"
        )
    labels = [key for key in _LABELS if key in data]
    if len(labels) > 1:
        raise ValueError(f"{where}: give label or answer, not both")
    value = data[forms[0]]
    return Prompt(
        text=_text(value, where) if forms[0] == "prompt" else None,
        ids=_ids(value, where) if forms[0] == "prompt_ids" else None,
        messages=_messages(value, where) if forms[0] == "messages" else None,
        label=data[labels[0]] if labels else None,
        metadata={key: data[key] for key in data if key not in (*forms, *labels)},
        source=where,
    )


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: prompt must be a non-empty string, got {value!r}")
    return value


def _ids(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: prompt_ids must be a non-empty list, got {value!r}")
    for position, item in enumerate(value):
        # True and False are ints in Python, but no token ids.
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ValueError(f"{where}: prompt_ids[{position}]={item!r} is not a token id")
    return tuple(value)


def _messages(value: object, where: str) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: messages must be a non-empty list, got {value!r}")
    for position, item in enumerate(value):
        if not isinstance(item, dict) or set(item) != {"role", "content"}:
            raise ValueError(f"{where}: messages[{position}] must have role and content: {item!r}")
        if not all(isinstance(part, str) for part in item.values()):
            raise ValueError(f"{where}: messages[{position}]: role and content must be strings")
    return tuple(value)


def check_prompts(
    prompts: tuple[Prompt, ...], *, vocab_size: int, room: int, tokenizer: bool, model: str
) -> None:
    """Raise `ValueError` for a prompt that the model cannot take, as far as it shows unread.

    `room` is the number of prompt tokens that fit beside the response; `tokenizer` says whether
    `model` can turn text into tokens.
    """
    for prompt in prompts:
        if prompt.needs_tokenizer and not tokenizer:
            raise ValueError(
                f"{prompt.source}: a text prompt, but {model} has no tokenizer; "
                "give prompt_ids, or a folder with tokenizer.json"
            )
        if prompt.ids is None:
            continue
        if max(prompt.ids) >= vocab_size:
            raise ValueError(
                f"{prompt.source}: token id {max(prompt.ids)} is outside the vocabulary of "
                f"{vocab_size}"
            )
        if len(prompt.ids) > room:
            raise ValueError(
                f"{prompt.source}: {len(prompt.ids)} prompt tokens, room for {room} beside the "
                "response; raise rollout.context_length or lower run.max_new_tokens"
            )
