"""One micro-batch: sequences packed without padding, and cut over context-parallel ranks.

With context parallelism each sequence is padded to a multiple of 2 * cp and cut into 2 * cp equal
chunks; rank r holds chunks r and 2 * cp - 1 - r (zigzag), so that causal attention would cost every
rank the same. The padding exists only between the ranks: attention never sees it, no loss row
points at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(kw_only=True)
class MicroBatch(PackedSeqParams):
    """What the layers need to know of a micro-batch; travels as megatron's packed_seq_params.

    tokens, positions: [T_local] int64, this rank's tokens and their positions in their sequences;
    sequences: [T_local] int64, the number of each one's sequence, -1 for padding.
    lengths: real tokens of every sequence of the micro-batch. natural: [sum(lengths)] int64, each
    real token's slot among all ranks' tokens (None without context parallelism). scored: [R] int64,
    rows whose next token is scored here; targets: [R] int64, those tokens; places: their numbers
    in the micro-batch's list of response tokens. The first `num_scored` rows count; a rank with
    none keeps one row, so that every rank runs the same ops. temperature: fp32 scalar tensor.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    sequences: torch.Tensor
    lengths: list[int]
    natural: torch.Tensor | None
    scored: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    num_scored: int
    total_scored: int
    temperature: torch.Tensor


def zigzag_slots(length: int, cp: int) -> tuple[int, list[int], list[int]]:
    """(tokens per rank, owner rank of each position, its slot there), for one padded sequence.

    Without context parallelism (cp=1) nothing is padded or moved.
    """
    if cp == 1:
        return length, [0] * length, list(range(length))
    chunk = -(-length // (2 * cp))
    owners, slots = [], []
    for position in range(2 * cp * chunk):
        index, inside = divmod(position, chunk)
        second = index >= cp
        owners.append(2 * cp - 1 - index if second else index)
        slots.append(inside + chunk if second else inside)
    return 2 * chunk, owners, slots


def pack(
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    *,
    temperature: float,
    device: torch.device,
    cp_size: int = 1,
    cp_rank: int = 0,
    first_sequence: int = 0,
) -> MicroBatch:
    """Pack sequences for one context-parallel rank.

    sequences: prompt and response token ids; prompt_lengths: how many of each are prompt, the rest
    is scored; first_sequence: the number of the first one in the whole batch. Raises `ValueError`
    on an empty sequence, or a response with nothing before it.
    """
    tokens: list[int] = []
    positions: list[int] = []
    owned: list[int] = []
    natural: list[int] = []
    scored: list[tuple[int, int, int]] = []
    local_total = sum(zigzag_slots(len(s), cp_size)[0] for s in sequences)
    offset = place = 0
    for number, (sequence, prompt) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        length = len(sequence)
        if length == 0 or not (1 <= prompt <= length):
            raise ValueError(
                f"sequence {number}: {length} tokens with prompt length {prompt}; a prompt needs "
                "at least one token and at most all of them"
            )
        per_rank, owners, slots = zigzag_slots(length, cp_size)
        here_tokens, here_positions = [0] * per_rank, [0] * per_rank
        here_owned = [-1] * per_rank
        for position in range(length):
            owner, slot = owners[position], slots[position]
            natural.append(owner * local_total + offset + slot)
            if owner == cp_rank:
                here_tokens[slot] = sequence[position]
                here_positions[slot] = position
                here_owned[slot] = first_sequence + number
                if position >= prompt - 1 and position + 1 < length:
                    target = sequence[position + 1]
                    scored.append((offset + slot, target, place + position - (prompt - 1)))
        tokens += here_tokens
        positions += here_positions
        owned += here_owned
        offset += per_rank
        place += length - prompt
    num_scored = len(scored)
    rows, targets, places = zip(*(scored or [(0, 0, 0)]), strict=True)

    def integers(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return MicroBatch(
        qkv_format="thd",
        tokens=integers(tokens),
        positions=integers(positions),
        sequences=integers(owned),
        lengths=[len(s) for s in sequences],
        natural=integers(natural) if cp_size > 1 else None,
        scored=integers(rows),
        targets=integers(targets),
        places=integers(places),
        num_scored=num_scored,
        total_scored=place,
        temperature=torch.tensor(temperature, dtype=torch.float32, device=device),
    )
