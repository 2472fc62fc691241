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
from ..ops.taps import PROMPT
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
    state.entering("lm_head", hidden_states)
    logits = linear(
        hidden_states, lm_head.weight, out_dtype=live.policy.contract.logprob.logits_dtype
    )
    return state.tap("lm_head", logits)


class _ContractLogSoftmax(TorchFunctionMode):
    """Inside: `torch.nn.functional.log_softmax` is the contract's. targets: [rows] the token whose
    logprob each row is for, over all calls."""

    def __init__(self, targets: torch.Tensor) -> None:
        super().__init__()
        self._targets, self._done = targets, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.log_softmax:
            return func(*args, **kwargs)
        (logits,) = args
        assert kwargs.get("dim") == -1, kwargs
        live = state.require()
        live.calls["prompt_log_softmax"] += 1
        first, self._done = self._done, self._done + logits.shape[0]
        vocabulary = live.policy.vocabulary(logits.shape[-1])
        if not logits.shape[0] or (live.taps is None and live.fault is None):
            return log_softmax(logits.float(), vocabulary)
        live.layer = None
        state.record("temperature", logits, "input", stream=PROMPT, gathered=True)
        # A temperature of 1 divides exactly: what enters is what leaves.
        scaled = state.tap("temperature", logits.float(), stream=PROMPT, gathered=True)
        logprobs = log_softmax(scaled, vocabulary)
        targets = self._targets[first : self._done].long().unsqueeze(1)
        chosen = state.tap("logprob", logprobs.gather(1, targets), stream=PROMPT)
        return logprobs.scatter(1, targets, chosen)


def prompt_logprobs(
    original: Callable[..., Any],
    self: Any,
    pruned_states: torch.Tensor,
    sample_indices: torch.Tensor,
    input_logprob_indices: torch.Tensor,
    token_to_seq_idx: list[int],
    lm_head: Any,
    get_logits_fn: Callable[..., Any],
    logits_metadata: Any,
    chunk_size: int,
) -> Any:
    """Logprobs of prompt tokens in the contract's order (at temperature 1, as SGLang has them)."""
    with _ContractLogSoftmax(logits_metadata.extend_input_logprob_token_ids_gpu):
        return original(
            self,
            pruned_states,
            sample_indices,
            input_logprob_indices,
            token_to_seq_idx,
            lm_head,
            get_logits_fn,
            logits_metadata,
            chunk_size,
        )


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
