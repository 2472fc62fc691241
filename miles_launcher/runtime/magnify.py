"""Rows around the first divergence, element by element, and the side unlike the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..parity.bisect import Comparison, Found, layer_column
from ..parity.elements import (
    StoredRow,
    differing,
    first_element,
    stored_row,
    ulp_histogram,
)
from ..parity.flow import Place
from ..parity.rows import RankRecord, TokenSlots
from ..plan import LaunchPlan
from .passes import Passes, keep_text, kept_tokens, row_bytes
from .third_opinion import Reference, can_judge, guilty_side, row_tensor

Token = tuple[int, int]


@dataclass(slots=True)
class Magnified:
    """`element` and `ulp` as in `bisect.json`; elements: per stored token, per layer of the heat
    map, how many elements of all op results differ; guilty: (side, rank) unlike the reference;
    row_bytes: of all stored rows."""

    element: dict[str, Any] | None = None
    ulp: dict[str, Any] | None = None
    elements: dict[Token, list[int]] = field(default_factory=dict)
    guilty: tuple[str, int | None] | None = None
    row_bytes: int = 0


def magnify(
    plan: LaunchPlan, passes: Passes, result: Comparison, slots: TokenSlots, weights: Path
) -> Magnified:
    """One more pass, which stores the rows of the first tokens that differ.

    Raises `ValueError` where a side stored none of the first one.
    """
    found = result.found
    assert found is not None
    tokens = kept_tokens(found, result.wrong[found.place], slots, row_bytes(plan.model))
    ours, theirs = passes.recorded(keep_text(found, tokens, slots))
    sides = _Sides(passes.between, ours, theirs, slots)
    first = (found.sequence, found.position)
    pair = sides.pair(found.place, first)
    if pair is None:
        raise ValueError(f"{found.place}: no side stored the row of token {first}")
    pairs = [p for token in tokens if (p := sides.pair(found.place, token)) is not None]
    return Magnified(
        element=first_element(*pair, passes.between),
        ulp=ulp_histogram(found.place, pairs),
        elements=_elements(result, sides, tokens, plan.model.num_hidden_layers),
        guilty=_guilty(plan, found, sides, pair, weights),
        row_bytes=sum(record.row_bytes for record in (*ours, *theirs)),
    )


class _Sides:
    """Stored rows of both sides by place and token."""

    def __init__(
        self,
        names: Sequence[str],
        ours: Sequence[RankRecord],
        theirs: Sequence[RankRecord],
        slots: TokenSlots,
    ) -> None:
        self.names, self._records, self.slots = names, (ours, theirs), slots

    def row(self, side: int, place: Place, token: Token) -> StoredRow | None:
        slot = int(self.slots.starts[token[0]]) + token[1]
        aliases = [token, *(t for t in self.slots.same_prefix(slot) if t != token)]
        return stored_row(self._records[side], place, aliases)

    def pair(self, place: Place, token: Token) -> tuple[StoredRow, StoredRow] | None:
        ours, theirs = (self.row(side, place, token) for side in (0, 1))
        return None if ours is None or theirs is None else (ours, theirs)


def _elements(
    result: Comparison, sides: _Sides, tokens: Sequence[Token], num_layers: int
) -> dict[Token, list[int]]:
    counts = {token: [0] * (num_layers + 2) for token in tokens}
    for place, wrong in result.wrong.items():
        if not place.is_output:
            continue
        for token in tokens:
            if not wrong[int(sides.slots.starts[token[0]]) + token[1]]:
                continue
            pair = sides.pair(place, token)
            if pair is not None:
                counts[token][layer_column(place, num_layers)] += int(differing(*pair).sum())
    return counts


def _guilty(
    plan: LaunchPlan,
    found: Found,
    sides: _Sides,
    pair: tuple[StoredRow, StoredRow],
    weights: Path,
) -> tuple[str, int | None] | None:
    if not (found.inputs_equal and can_judge(found.place, plan.device)):
        return None
    inputs: dict[str, torch.Tensor] = {}
    for source, _ in found.inputs:
        first = 0 if source.tensor in ("key", "value") else found.position
        rows = [
            sides.row(1, source, (found.sequence, position))
            for position in range(first, found.position + 1)
        ]
        if any(row is None for row in rows):
            return None
        inputs[source.tensor] = torch.stack([row_tensor(row) for row in rows if row is not None])
    tokens = sides.slots
    slot = found.slot
    token = {
        "id": int(tokens.ids[slot]),
        "position": found.position,
        "next": int(tokens.ids[slot + 1]),
    }
    reference = Reference(plan, weights)
    if found.place.op == "logprob":
        expected = reference.logprob(inputs["output"], token)
    else:
        expected = reference.output(found.place, inputs, token)
    return guilty_side(expected, dict(zip(sides.names, pair, strict=True)))
