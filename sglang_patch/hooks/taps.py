"""`sglang.srt.model_executor.model_runner.ModelRunner.forward`: which token each row is.

The taps of the other hooks see rows without names. Here, before each forward pass, the batch's
requests and positions are published to them, for prefill, chunked prefill and decode alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import state
from .target import Hook

REQUEST_PREFIX = "true-on-policy-tap-"


def sequence_of(request_id: str) -> int:
    """The sequence number in a request id that the launcher gave, or -1 for any other request."""
    number = request_id.removeprefix(REQUEST_PREFIX).partition("-")[0]
    return int(number) if request_id.startswith(REQUEST_PREFIX) else -1


def token_rows(
    request_ids: Sequence[str], lengths: Sequence[int], positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """([rows, 2], [requests, 2]) int64: (sequence, position) of every row and of each request's
    last, the one that is sampled from. lengths: rows of each request; positions: [rows].

    Raises `ValueError` where the lengths do not add up to the rows.
    """
    sequences = torch.tensor([sequence_of(request_id) for request_id in request_ids])
    counts = torch.tensor(lengths)
    if len(request_ids) != len(lengths) or int(counts.sum()) != positions.shape[0]:
        raise ValueError(
            f"taps: {len(request_ids)} requests with {list(lengths)} rows, but the pass has "
            f"{positions.shape[0]}; padded passes cannot be recorded"
        )
    rows = torch.stack((sequences.repeat_interleave(counts), positions.to(torch.int64)), dim=1)
    return rows, rows[counts.cumsum(0) - 1]


def forward(
    original: Callable[..., Any], self: Any, forward_batch: Any, *args: Any, **kw: Any
) -> Any:
    """One forward pass; with taps on, its rows are named first."""
    taps = state.require().taps
    if taps is not None and not forward_batch.forward_mode.is_idle():
        extend = forward_batch.forward_mode.is_extend()
        lengths = forward_batch.extend_seq_lens_cpu if extend else [1] * len(forward_batch.rids)
        taps.at(*token_rows(forward_batch.rids, lengths, forward_batch.positions.cpu()))
    return original(self, forward_batch, *args, **kw)


HOOKS = (
    Hook(
        name="forward",
        target="sglang.srt.model_executor.model_runner.ModelRunner.forward",
        digest="110f3b02b09b0af2",
        replacement=forward,
    ),
)
