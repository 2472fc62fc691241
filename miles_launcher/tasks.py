"""Built-in tasks: prompts with a verifiable reward, for a run that is given neither."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .prompts import Prompt
from .rewards import Reward, RewardSample

_LOWERCASE = frozenset(string.ascii_lowercase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Prompts and the reward that judges the responses to them."""

    prompts: tuple[Prompt, ...]
    reward: Reward


def lowercase_share(samples: list[RewardSample]) -> list[float]:
    """The share of each response that is lowercase ASCII letters, 0 to 1; an empty response is 0.

    Counted against characters or tokens, whichever are more, so that tokens which decode to
    nothing (rows of the vocabulary without a token) count as misses. Near 0.05 for byte-level
    tokens drawn evenly, and every token of a response contributes: something to learn at once.
    """
    shares = []
    for sample in samples:
        letters = sum(character in _LOWERCASE for character in sample.response)
        shares.append(letters / max(1, len(sample.response), len(sample.response_ids)))
    return shares


def _lowercase_prompts() -> tuple[Prompt, ...]:
    # Lengths differ on purpose: a batch of equal lengths would never pad or pack.
    orders = ("Write lowercase letters", "Letters only", "Spell something small", "Say a word")
    return tuple(
        Prompt(
            text=f"{orders[index % len(orders)]}, starting with {letter * (1 + index % 5)}: ",
            label=letter,
            source=f"builtin:lowercase, prompt {index}",
        )
        for index, letter in enumerate(string.ascii_lowercase)
    )


TASKS: Mapping[str, Task] = MappingProxyType(
    {"lowercase": Task(prompts=_lowercase_prompts(), reward=lowercase_share)}
)
