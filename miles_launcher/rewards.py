"""The reward interface: a function over the samples of a step, loaded by name and checked.

`reward(samples: list[RewardSample]) -> list[float]`, one finite number a sample, in order. It is
named `module:function` (importable, or a file in the current directory) or `builtin:NAME`.
"""

from __future__ import annotations

import importlib
import math
import numbers
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

BUILTIN = "builtin:"
_SPEC = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSample:
    """What a reward may look at: one prompt, one response, and the prompt's label and metadata.

    `response` is `response_ids` decoded without special tokens; both may be empty.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    response: str
    response_ids: tuple[int, ...]
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


Reward: TypeAlias = Callable[[list[RewardSample]], list[float]]


class RewardError(ValueError):
    """A reward that raised or returned something that is not one finite number a sample."""


def check_reward_name(spec: str) -> None:
    """Raise `ValueError` unless `spec` has a form that `load_reward` reads; imports nothing."""
    from .tasks import TASKS

    if spec.startswith(BUILTIN):
        name = spec.removeprefix(BUILTIN)
        if name not in TASKS:
            raise ValueError(f"unknown built-in reward {name!r}; choose from {', '.join(TASKS)}")
    elif not _SPEC.fullmatch(spec):
        raise ValueError(f"--reward {spec!r}: write module:function, such as my_rewards:score")


def load_reward(spec: str) -> Reward:
    """The reward called `spec`. Raises `ValueError` saying what could not be imported or found.

    The current directory is searched last, so that nothing in it can shadow an installed package.
    """
    from .tasks import TASKS

    check_reward_name(spec)
    if spec.startswith(BUILTIN):
        return TASKS[spec.removeprefix(BUILTIN)].reward
    module_name, _, function_name = spec.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ValueError(f"--reward {spec}: importing {module_name} failed: {error!r}") from error
    function: Reward | None = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"--reward {spec}: {module_name} has no function {function_name}")
    return function


def score(reward: Reward, samples: Sequence[RewardSample]) -> list[float]:
    """Rewards of the samples as Python floats.

    Raises `RewardError` naming the sample (its number and prompt) where the function raises, or
    returns NaN, an infinity, no number, or another count than the samples.
    """
    try:
        values = reward(list(samples))
    except Exception as error:  # a user's function may raise anything
        raise RewardError(f"the reward raised {error!r} {_culprit(reward, samples)}") from error
    if not isinstance(values, (list, tuple)):
        raise RewardError(
            f"the reward returned {type(values).__name__}, expected a list of "
            f"{len(samples)} numbers (of an array, return .tolist())"
        )
    if len(values) != len(samples):
        raise RewardError(f"the reward returned {len(values)} values for {len(samples)} samples")
    return [_number(value, i, samples[i]) for i, value in enumerate(values)]


def _number(value: object, index: int, sample: RewardSample) -> float:
    # numbers.Real takes NumPy scalars and bool (a pass or fail) along with int and float.
    if not isinstance(value, numbers.Real):
        raise RewardError(
            f"the reward returned {value!r} ({type(value).__name__}), not a number, "
            f"{_name(index, sample)}"
        )
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"the reward returned {number} {_name(index, sample)}")
    return number


def _culprit(reward: Reward, samples: Sequence[RewardSample]) -> str:
    """The first sample on which the reward also raises alone."""
    for index, sample in enumerate(samples):
        try:
            reward([sample])
        except Exception:  # this is the search for the sample that raises
            return _name(index, sample)
    return f"on the {len(samples)} samples together, though on none alone"


def _name(index: int, sample: RewardSample) -> str:
    return f"for sample {index} (prompt {sample.prompt[:60]!r}, response {sample.response[:60]!r})"
