"""`sglang.srt.layers.sampler.Sampler.forward`: fp32 from the logits to the sampled logprob.

Stock `rl_on_policy_target` rounds logits to bf16 before and after the temperature, which moves
every decode logprob. Here the token is drawn from, and scored by, one fp32 log-softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import state
from ..ops import log_softmax, temperature_logits
from .target import Hook


def _check(info: Any) -> None:
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    top_ks = info.top_ks
    truncated = info.need_top_k_sampling and bool(((top_ks != 1) & (top_ks != TOP_K_ALL)).any())
    broken = [
        name
        for name, used in (
            ("top_p", info.need_top_p_sampling),
            ("top_k", truncated),
            ("min_p", info.need_min_p_sampling),
            ("a custom logit processor", info.has_custom_logit_processor),
            ("a grammar", bool(info.grammars)),
            ("logit_bias", info.logit_bias is not None),
            ("a penalty", _penalised(info)),
            ("a sampling mask", any(info.return_sampling_masks or [])),
        )
        if used
    ]
    if broken:
        raise ValueError(
            f"sampling with {', '.join(broken)} renormalises what was sampled, so the trainer "
            "would score another distribution; use temperature alone"
        )


def _penalised(info: Any) -> bool:
    orchestrator = getattr(info, "penalizer_orchestrator", None)
    return orchestrator is not None and bool(orchestrator.is_required)


def forward(
    original: Callable[..., Any],
    self: Any,
    logits_output: Any,
    sampling_info: Any,
    return_logprob: bool,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[list[int]],
    positions: torch.Tensor,
) -> torch.Tensor:
    """next_token_logits: [requests, vocab] fp32 -> sampled ids [requests] int32."""
    _check(sampling_info)
    live = state.require()
    logits = logits_output.next_token_logits
    live.layer = None
    vocabulary = live.policy.vocabulary(logits.shape[-1])
    tapped = live.taps is not None or live.fault is not None
    temperature: torch.Tensor | None = sampling_info.temperatures
    if tapped:
        state.record("temperature", logits, "input", gathered=True)
        logits = temperature_logits(logits, sampling_info.temperatures)
        temperature = None
    # Without taps the divided logits exist in the kernels alone.
    logits = state.tap("temperature", logits, gathered=True)
    logprobs = log_softmax(logits, vocabulary, temperature)
    # Division keeps order, so the largest logit is the largest before and after it.
    if sampling_info.is_all_greedy:
        token_ids = torch.argmax(logits, dim=-1).to(torch.int32)
    else:
        if sampling_info.sampling_seed is None:
            raise ValueError("sampling needs a seed per request: enable deterministic inference")
        token_ids = self._sample_from_logprobs(logprobs, sampling_info, positions)
        # A greedy request in a mixed batch arrives as top_k = 1.
        greedy = torch.argmax(logits, dim=-1).to(torch.int32)
        token_ids = torch.where(sampling_info.top_ks == 1, greedy, token_ids)
    if tapped:
        # The tapped row is the one number that the trainer computes too.
        chosen = token_ids.long().unsqueeze(1)
        logprobs = logprobs.scatter(1, chosen, state.tap("logprob", logprobs.gather(1, chosen)))
    if return_logprob:
        result = self.output_logprob_processor.compute_logprobs(
            logprobs, top_logprobs_nums, token_ids_logprobs, token_ids
        )
        result.write_output_to(logits_output)
    self._sync_token_ids_across_tp(token_ids, sampling_info)
    return token_ids


HOOKS = (
    Hook(
        name="sampler",
        target="sglang.srt.layers.sampler.Sampler.forward",
        digest="efec3bc4f1ae1224",
        replacement=forward,
    ),
)
