"""The reward of the gate's training steps: random weights must get unequal rewards, or the group
advantages, and with them the gradient, are zero."""

from __future__ import annotations

from ..rewards import RewardSample


def even_share(samples: list[RewardSample]) -> list[float]:
    """The share of even token ids in each response, 0 to 1."""
    return [
        sum(token % 2 == 0 for token in sample.response_ids) / max(1, len(sample.response_ids))
        for sample in samples
    ]
