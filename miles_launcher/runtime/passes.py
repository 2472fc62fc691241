"""The same batch through two sides again and again; a pass that comes out otherwise is an error."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..bisection import ENGINES, Sides
from ..layout import Layout
from ..parity.bisect import Found
from ..parity.gate import GateClosed
from ..parity.rows import RankRecord, TokenSlots
from ..profiles import ModelProfile
from .batch import Batch
from .loop import Loop, rollout_logprobs
from .rollout import TAP_REQUEST
from .session import Session

# Bytes of stored rows a side, over all its ranks.
_KEPT_BYTES = 256 << 20
_MAX_KEPT = 64


@dataclass(frozen=True, slots=True)
class Expected:
    """What an earlier run saw of this batch: tokens, and logprobs by side."""

    tokens: list[list[int]]
    logprobs: dict[str, list[list[float]]]


class Passes:
    """One step's batch, sampled by the rollout and scored by the second side."""

    def __init__(self, loop: Loop, session: Session, step: int, between: Sides) -> None:
        self._loop, self._session, self._step = loop, session, step
        self.between = between
        self._number = 0
        self._batch: Batch
        self._logprobs: tuple[list[Any], list[Any]]

    def _names(self, count: int) -> list[str]:
        return [f"{TAP_REQUEST}{i}-{self._number}" for i in range(count)]

    def _sample(self) -> tuple[Batch, list[Any]]:
        self._number += 1
        _, generations, batch = self._loop.sample(
            self._step, lambda i: f"{TAP_REQUEST}{i}-{self._number}"
        )
        return batch, rollout_logprobs(generations)

    def _score(self, batch: Batch) -> list[Any]:
        if self.between == ENGINES:
            return self._session.score(batch)
        longest = max(len(tokens) for tokens in batch.tokens)
        if longest >= self._loop.context_length:
            raise ValueError(
                f"a prefill of {longest} tokens needs one more in a context of "
                f"{self._loop.context_length}; lower run.max_new_tokens, or raise "
                "rollout.context_length"
            )
        self._number += 1
        return self._session.rescore(batch, self._names(len(batch)))

    def plain(self, expected: Expected | None = None) -> Batch:
        """Without taps; the batch that every further pass must repeat. `GateClosed` where it is
        not the one expected."""
        self._batch, logprobs = self._sample()
        self._logprobs = logprobs, self._score(self._batch)
        if expected is not None:
            if self._batch.tokens != expected.tokens:
                raise GateClosed(
                    "the rollout samples other tokens than in the run whose batch this is: what "
                    "went wrong there does not repeat"
                )
            for side, now in zip(self.between, self._logprobs, strict=True):
                before = expected.logprobs.get(side)
                if before is not None and _bytes(before) != _bytes(now):
                    raise GateClosed(
                        f"the {side}'s logprobs are others than in the run whose batch this is: "
                        "what went wrong there does not repeat"
                    )
        return self._batch

    @property
    def returned(self) -> tuple[list[Any], list[Any]]:
        """The logprobs that both sides returned in the pass without taps."""
        return self._logprobs

    def recorded(self, keep: str | None = None) -> tuple[list[RankRecord], list[RankRecord]]:
        """With taps: the records of both sides. `GateClosed` where tokens or logprobs are not
        those of the pass without."""
        self._session.start_rollout_taps(keep)
        batch, logprobs = self._sample()
        ours = self._session.finish_rollout_taps(self.between[0])
        if batch != self._batch:
            raise GateClosed("the rollout sampled other tokens from the same prompts and seeds")
        scores, theirs = self.scored(batch, keep)
        for side, first, again in zip(
            self.between, self._logprobs, (logprobs, scores), strict=True
        ):
            if _bytes(first) != _bytes(again):
                raise GateClosed(f"the {side}'s logprobs of the same tokens did not repeat")
        return ours, theirs

    def scored(
        self, batch: Batch, keep: str | None = None, fault: str | None = None
    ) -> tuple[list[Any], list[RankRecord]]:
        """The second side's logprobs of a batch and its record."""
        if self.between == ENGINES:
            self._session.start_trainer_taps(keep, fault)
            return self._session.score(batch), self._session.finish_trainer_taps()
        self._session.start_rollout_taps(keep, fault)
        return self._score(batch), self._session.finish_rollout_taps(self.between[1])

    def check_returned(self) -> None:
        """`GateClosed` where the logprobs that the two sides returned differ: rows that are equal
        at every tap say nothing of what happens to a logprob after the last one."""
        ours, theirs = (np.concatenate([np.asarray(r) for r in rows]) for rows in self._logprobs)
        if ours.size == 0 or ours.shape != theirs.shape:
            raise GateClosed(f"{ours.size} and {theirs.size} returned logprobs: nothing is shown")
        unequal = ours.astype(np.float32).view(np.int32) != theirs.astype(np.float32).view(np.int32)
        if unequal.any():
            raise GateClosed(
                f"no tapped tensor differs, and yet {int(unequal.sum())} of {unequal.size} "
                "returned logprobs do: what carries them away from the logprob op is at fault"
            )

    def sampled(self, fault: str) -> tuple[Batch, list[RankRecord]]:
        """What the rollout samples with a fault, and its record; nothing has to repeat."""
        self._session.start_rollout_taps(None, fault)
        batch, _ = self._sample()
        return batch, self._session.finish_rollout_taps(self.between[0])


def kept_tokens(
    found: Found, wrong: Any, slots: TokenSlots, bytes_per_token: int
) -> list[tuple[int, int]]:
    """The tokens whose rows the last pass stores: those that differ at the first divergence, as
    many as fit, the first one first."""
    room = int(np.clip(_KEPT_BYTES // max(1, bytes_per_token), 1, _MAX_KEPT))
    tokens: list[tuple[int, int]] = []
    for slot in slots.by_position(np.flatnonzero(wrong)):
        # Each sequence with this prefix may have computed the token by itself.
        room -= len(slots.same_prefix(int(slot)))
        if tokens and room < 0:
            break
        tokens.append(slots.token(int(slot)))
    assert tokens[0] == (found.sequence, found.position)
    return tokens


def keep_text(found: Found, tokens: Sequence[tuple[int, int]], slots: TokenSlots) -> str:
    """What the ranks are asked to store (`sglang_patch.ops.taps.parse_kept`)."""

    def aliases(token: tuple[int, int]) -> list[tuple[int, int]]:
        # A cached token was computed by another sequence with the same prefix.
        slot = int(slots.starts[token[0]]) + token[1]
        return [token, *(t for t in slots.same_prefix(slot) if t != token)]

    everywhere = {alias for token in tokens for alias in aliases(token)}
    taps: dict[str, set[tuple[int, int]]] = {}
    if not found.place.is_output:
        taps[found.place.tap] = set(everywhere)
    first = (found.sequence, found.position)
    for source, _ in found.inputs:
        rows = [first]
        if source.tensor in ("key", "value"):
            rows = [(found.sequence, position) for position in range(found.position + 1)]
        taps.setdefault(source.tap, set()).update(a for row in rows for a in aliases(row))
    return json.dumps(
        {
            "outputs": sorted(everywhere),
            "taps": {name: sorted(wanted) for name, wanted in taps.items()},
        }
    )


def row_bytes(model: ModelProfile) -> int:
    """Bytes of one token's output rows over all ops, and of the logits in fp32."""
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    layer = 4 * model.hidden_size + 4 * queries + 4 * keys + 3 * model.intermediate_size
    head = 2 * 4 * model.vocab_size
    return 2 * model.num_hidden_layers * layer + head


def _bytes(logprobs: Sequence[Any]) -> bytes:
    return b"|".join(np.asarray(row, dtype=np.float32).tobytes() for row in logprobs)


def side_sizes(between: Sides, layout: Layout) -> tuple[int, int]:
    """Tensor-parallel sizes of the two sides."""
    return layout.rollout_tp, layout.train_tp if between == ENGINES else layout.rollout_tp


def expected_from(data: Mapping[str, Any]) -> Expected:
    """From a saved mismatch."""
    return Expected(
        data["tokens"],
        {
            "rollout": data["rollout_logprobs"],
            "decode": data["rollout_logprobs"],
            "trainer": data["trainer_logprobs"],
        },
    )
