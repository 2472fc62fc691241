"""A one-ulp fault at every tap of both sides, each of which the comparison has to name.

A comparison that finds nothing is worth what it would have found. For every op of every layer, on
either side, the fault is injected on the last tensor-parallel rank, in one row of every call, and
the first divergence must be that op, that token, one ulp in one element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..parity.bisect import Flow, Found, compare_rows
from ..parity.flow import SCORED_OPS, Place
from ..parity.rows import RankRecord, TokenSlots
from ..plan import LaunchPlan
from .batch import Batch
from .passes import Passes, side_sizes
from .progress import Progress

# The row of each call that is wrong; of the head's rows every one: a call may have a single row.
ROW = 2
Token = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """One injected fault: where it was, and what the comparison named instead (None: the place)."""

    fault: str
    token: Token
    problem: str | None


def sweep(
    plan: LaunchPlan,
    passes: Passes,
    batch: Batch,
    flow: Flow,
    progress: Progress,
    sides: Sequence[str],
) -> tuple[dict[str, Any], str, int]:
    """(the rest of bisect.json, the sentence, the exit code): 0 where every fault was named.
    sides: those into which faults are injected."""
    ours, theirs = passes.recorded()
    sizes = side_sizes(passes.between, plan.layout)
    slots = TokenSlots(batch.tokens, batch.prompt_lengths)
    clean = compare_rows(ours, theirs, sizes, flow, slots)
    if clean.found is not None:
        raise ValueError(
            f"the two sides differ at {clean.found.place} without a fault; run `miles bisect` "
            "without --sweep first"
        )
    results = []
    places = [place for place in flow.places if place.is_output]
    total = len(sides) * len(places)
    with progress.counting("faults", total) as advance:
        for place in places if passes.between[0] in sides else []:
            text = fault_text(place, sizes[0])
            sampled, faulty = passes.sampled(text)
            _, scored = passes.scored(sampled)
            table = TokenSlots(sampled.tokens, sampled.prompt_lengths)
            found = compare_rows(faulty, scored, sizes, flow, table).found
            token = first_token(place, faulty, sizes[0] - 1, table)
            results.append(_judge(passes.between[0], text, place, token, found))
            advance()
        for place in places if passes.between[1] in sides else []:
            text = fault_text(place, sizes[1])
            _, faulty = passes.scored(batch, fault=text)
            found = compare_rows(ours, faulty, sizes, flow, slots).found
            token = first_token(place, faulty, sizes[1] - 1, slots)
            results.append(_judge(passes.between[1], text, place, token, found))
            advance()
    missed = [result for result in results if result.problem is not None]
    data = {"sweep": [asdict(result) for result in results]}
    if missed:
        shown = "; ".join(f"{r.fault}: {r.problem}" for r in missed[:4])
        return data, f"{len(missed)} of {total} injected faults were not named: {shown}", 3
    return data, f"all {total} injected faults were named: layer, op and token", 0


def fault_text(place: Place, tp_size: int) -> str:
    """`LAYER:OP:RANK[:ROW]`, on the last rank."""
    layer = "final" if place.layer is None else str(place.layer)
    text = f"{layer}:{place.op}:{tp_size - 1}"
    return text if place.op in SCORED_OPS else f"{text}:{ROW}"


def first_token(place: Place, records: Sequence[RankRecord], rank: int, slots: TokenSlots) -> Token:
    """The (position, sequence) that comes first among the rows in which the fault was."""
    found: list[Token] = []
    for record in records:
        if record.tp_rank != rank or place.tap not in record.taps:
            continue
        tokens, numbers, _ = record.located(place.tap)
        for (sequence, position), number in zip(tokens.tolist(), numbers.tolist(), strict=True):
            if place.op not in SCORED_OPS and number != ROW:
                continue
            if position >= slots.lengths[sequence]:
                continue
            slot = int(slots.starts[sequence]) + position
            # Tokens that were found in the prefix cache are as wrong as their source.
            same = [(sequence, position)]
            if place.op not in SCORED_OPS:
                same = slots.same_prefix(slot)
            found += [(p, s) for s, p in same if slots.needed(place)[int(slots.starts[s]) + p]]
    if not found:
        raise ValueError(f"{place}: no call has a row {ROW}; use more or longer prompts")
    return min(found)


def _judge(side: str, text: str, place: Place, token: Token, found: Found | None) -> SweepResult:
    problem = None
    if found is None:
        problem = "nothing was found"
    elif (found.place, found.position, found.sequence) != (place, *token):
        problem = (
            f"named {found.place} at sequence {found.sequence} position {found.position}, not "
            f"sequence {token[1]} position {token[0]}"
        )
    elif not found.inputs_equal:
        problem = "named, but not its inputs as equal"
    return SweepResult(fault=f"{side}:{text}", token=(token[1], token[0]), problem=problem)
