"""Group-relative advantages (GRPO; Shao et al., 2024, arXiv 2402.03300)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float], samples_per_prompt: int) -> list[float]:
    """One advantage a sequence: its reward less the mean of its prompt's samples, over their
    standard deviation. Samples of a prompt are consecutive; a group of equal rewards (or of one
    sample) teaches nothing and has advantage 0."""
    if len(rewards) % samples_per_prompt:
        raise ValueError(
            f"{len(rewards)} rewards are not a multiple of {samples_per_prompt} samples a prompt"
        )
    groups = np.asarray(rewards, dtype=np.float64).reshape(-1, samples_per_prompt)
    centred = groups - groups.mean(axis=1, keepdims=True)
    return [float(a) for a in (centred / (groups.std(axis=1, keepdims=True) + _EPSILON)).ravel()]
