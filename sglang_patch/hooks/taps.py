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
    request_ids: Sequence[str],
    lengths: Sequence[int],
    positions: torch.Tensor,
    scored_from: Sequence[int] | None = None,
) -> dict[str, torch.Tensor]:
    """(sequence, position), [n, 2] int64, of the rows of each stream of a pass (`ops.taps`).

    lengths: rows of each request; positions: [rows]; scored_from: for each request the row from
    which on the next token is scored too, its number of rows for none (None: of no request). The
    last row of a request is sampled from. Raises `ValueError` where the lengths do not add up.
    """
    sequences = torch.tensor([sequence_of(request_id) for request_id in request_ids])
    counts = torch.tensor(lengths)
    if len(request_ids) != len(lengths) or int(counts.sum()) != positions.shape[0]:
        raise ValueError(
            f"taps: {len(request_ids)} requests with {list(lengths)} rows, but the pass has "
            f"{positions.shape[0]}; padded passes cannot be recorded"
        )
    rows = torch.stack((sequences.repeat_interleave(counts), positions.to(torch.int64)), dim=1)
    last = counts.cumsum(0) - 1
    starts = counts if scored_from is None else torch.tensor(scored_from)
    within = torch.arange(rows.shape[0]) - (last + 1 - counts).repeat_interleave(counts)
    prompt = within >= starts.repeat_interleave(counts)
    head = prompt.clone()
    head[last] = True
    return {"tokens": rows, "head": rows[head], "scored": rows[last], "prompt": rows[prompt]}


def forward(
    original: Callable[..., Any], self: Any, forward_batch: Any, *args: Any, **kw: Any
) -> Any:
    """One forward pass; with taps on, its rows are named first."""
    taps = state.require().taps
    if taps is not None and not forward_batch.forward_mode.is_idle():
        lengths, scored_from = [1] * len(forward_batch.rids), None
        if forward_batch.forward_mode.is_extend():
            lengths = forward_batch.extend_seq_lens_cpu
            if forward_batch.return_logprob:
                scored_from = forward_batch.extend_logprob_start_lens_cpu
        positions = forward_batch.positions.cpu()
        taps.at(**token_rows(forward_batch.rids, lengths, positions, scored_from))
    return original(self, forward_batch, *args, **kw)


HOOKS = (
    Hook(
        name="forward",
        target="sglang.srt.model_executor.model_runner.ModelRunner.forward",
        digest="110f3b02b09b0af2",
        replacement=forward,
    ),
)
