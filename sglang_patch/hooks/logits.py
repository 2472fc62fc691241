"""`sglang.srt.layers.logits_processor`: logits from bf16 operands, and prompt logprobs.

Upstream surfaces: `LogitsProcessor._compute_lm_head` and
`logprob_processor.InputLogprobProcessor._forward_by_chunk` (re-scoring by prefill).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import state
from ..ops import linear, log_softmax
from .target import Hook


def lm_head(
    original: Callable[..., Any],
    self: Any,
    hidden_states: torch.Tensor,
    lm_head: Any,
    embedding_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """hidden_states: [tokens, hidden] bf16 -> this rank's logits [tokens, vocab_local] in the
    contract's logits dtype, straight from the fp32 accumulator."""
    if embedding_bias is not None or self.logit_scale is not None or self.final_logit_softcapping:
        raise ValueError("lm_head: bias, scale and soft cap are not part of the contract")
    live = state.require()
    live.layer = None
    logits = linear(
        hidden_states, lm_head.weight, out_dtype=live.policy.contract.logprob.logits_dtype
    )
    return state.tap("lm_head", logits)


class _ContractLogSoftmax(TorchFunctionMode):
    """Inside: `torch.nn.functional.log_softmax` is the contract's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.log_softmax:
            return func(*args, **kwargs)
        (logits,) = args
        assert kwargs.get("dim") == -1, kwargs
        live = state.require()
        live.calls["prompt_log_softmax"] += 1
        return log_softmax(logits.float(), live.policy.vocabulary(logits.shape[-1]))


def prompt_logprobs(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Logprobs of prompt tokens in the contract's order (at temperature 1, as SGLang has them)."""
    with _ContractLogSoftmax():
        return original(*args, **kwargs)


HOOKS = (
    Hook(
        name="lm_head",
        target="sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        digest="89f11dc68e71c8f0",
        replacement=lm_head,
    ),
    Hook(
        name="prompt_logprobs",
        target="sglang.srt.layers.logprob_processor.InputLogprobProcessor._forward_by_chunk",
        digest="c58b4dae103f9dde",
        replacement=prompt_logprobs,
    ),
)
