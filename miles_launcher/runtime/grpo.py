"""The policy loss: PPO's clipped ratio with group advantages (GRPO)."""

from __future__ import annotations

import torch


def clipped_policy_loss(
    new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip_eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over tokens of `-min(r * A, clip(r, 1 - eps, 1 + eps) * A)`, `r = exp(new - old)`.

    new: [tokens] fp32 logprobs with a gradient; old: [tokens] fp32, the rollout's; advantages:
    [tokens] fp32. Returns (loss sum, number of clipped tokens), fp32 scalars. Schulman et al., 2017
    (arXiv 1707.06347), eq. 7; Shao et al., 2024 (arXiv 2402.03300).
    """
    ratio = torch.exp(new - old)
    clipped = ratio.clamp(1.0 - clip_eps, 1.0 + clip_eps)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    return loss, (clipped != ratio).sum()
