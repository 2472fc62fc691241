"""Text to tokens and back, with the tokenizer of the model's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..prompts import Prompt

_TOKENIZER_FILE = "tokenizer.json"


class Tokenization:
    """The folder's `tokenizer.json`, read by the small `tokenizers` library; chat messages go
    through the folder's chat template and need transformers, which is loaded then."""

    def __init__(self, model_path: Path) -> None:
        self._folder = model_path
        self._tokenizer: Any = None
        self._chat: Any = None
        if (model_path / _TOKENIZER_FILE).is_file():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(model_path / _TOKENIZER_FILE))

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt in any of its three forms; `ValueError` where it has none."""
        if prompt.ids is not None:
            return prompt.ids
        if self._tokenizer is None:
            raise ValueError(f"{prompt.source}: text, but {self._folder} has no {_TOKENIZER_FILE}")
        if prompt.text is not None:
            ids = tuple(self._tokenizer.encode(prompt.text, add_special_tokens=False).ids)
        else:
            ids = self._encode_messages(prompt)
        if not ids:
            raise ValueError(f"{prompt.source}: the prompt has no tokens")
        return ids

    def _encode_messages(self, prompt: Prompt) -> tuple[int, ...]:
        if self._chat is None:
            from transformers import AutoTokenizer

            self._chat = AutoTokenizer.from_pretrained(self._folder)
        assert prompt.messages is not None
        text = self._chat.apply_chat_template(
            [dict(message) for message in prompt.messages],
            tokenize=False,
            add_generation_prompt=True,
        )
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; empty where the folder has no tokenizer."""
        if self._tokenizer is None:
            return ""
        known = [i for i in token_ids if self._tokenizer.id_to_token(i) is not None]
        return str(self._tokenizer.decode(known, skip_special_tokens=True))
