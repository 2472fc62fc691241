"""`run_bisect`: one batch through both sides with taps on, and where they first differ.

Three passes over the same prompts and seeds. The first, without taps, samples the batch. The second
records a digest of every token row at every op; tokens and logprobs must be those of the first, bit
for bit, so that what is compared is what a launch runs. Where a row differs, a third pass stores
the rows of the tokens that differ first, of every op.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bisection import ENGINES, PHASES, Sides
from ..mismatch import read_mismatch
from ..parity.bisect import (
    BISECT_FILE,
    Comparison,
    Flow,
    compare_rows,
    first_divergence,
    heat_map,
    sentence,
)
from ..parity.flow import data_flow
from ..parity.gate import GateClosed
from ..parity.page import PAGE_FILE, write_page
from ..parity.report import Report
from ..parity.rows import TokenSlots
from ..parity.suspects import look_at
from ..plan import LaunchPlan, read
from ..seeded_weights import ensure_seeded_weights
from .batch import Batch
from .cluster import ProcessDied
from .driver import (
    CONFIGURATION,
    DIED,
    EXACT,
    GATE,
    INTERRUPTED,
    new_report,
    running_cluster,
)
from .loop import Loop
from .magnify import Magnified, magnify
from .passes import Passes, expected_from, side_sizes
from .progress import Progress
from .session import Session
from .sweep import sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectOptions:
    """between: the two sides; replay: a saved mismatch whose batch must repeat; sweep: the
    sides at whose every tap a fault is injected instead, to say whether each was found."""

    between: Sides = ENGINES
    replay: Path | None = None
    sweep: tuple[str, ...] = ()


def run_bisect(plan_path: Path, options: BisectOptions = BisectOptions()) -> int:
    """Run the plan in `plan_path`; returns 0 equal, 3 a divergence, 2 configuration, 4 a process
    died, 130 interrupted. `bisect.json` and `bisect.html` beside the plan say which; only a
    comparison that came to its end has `first_divergence` in it."""
    plan = read(plan_path)
    report = new_report(plan)
    progress = Progress(report, steps=False)
    data: dict[str, Any] = {}
    code = EXACT
    try:
        with progress:
            data, message, code = _bisect(plan, options, report, progress)
        ended = "complete"
    except GateClosed as closed:
        ended, code, message = "gate closed", GATE, str(closed)
    except ProcessDied as died:
        ended, code, message = "process died", DIED, str(died)
    except ValueError as error:
        ended, code, message = "configuration", CONFIGURATION, str(error)
    except KeyboardInterrupt:
        ended, code, message = "interrupted", INTERRUPTED, "interrupted; every process was ended"
    about = {"between": list(options.between), "ended": ended, "message": message}
    path = _write(plan, report, {**about, "exit_code": code, **data})
    text = message if ended == "complete" else f"{ended}: {message}"
    progress.console.print(text, markup=False, soft_wrap=True)
    progress.console.print(f"report: {path}", markup=False, soft_wrap=True)
    return code


def _write(plan: LaunchPlan, report: Report, data: dict[str, Any]) -> Path:
    """Both files, whole or not at all; returns the one to open."""
    about = {
        name: getattr(report, name)
        for name in ("model", "contract", "segments", "layout", "device", "versions")
    }
    whole = {**about, "fingerprint": report.fingerprint, "seconds": report.start_seconds, **data}
    out = Path(plan.paths.out)
    text = json.dumps(whole, indent=1, allow_nan=False)
    path = out / BISECT_FILE
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.rename(path)
    if "sweep" in data:
        return path
    write_page(whole, out / PAGE_FILE)
    return out / PAGE_FILE


def _bisect(
    plan: LaunchPlan, options: BisectOptions, report: Report, progress: Progress
) -> tuple[dict[str, Any], str, int]:
    """(the rest of bisect.json, the sentence, the exit code)."""
    seconds, between = report.start_seconds, options.between
    weights = Path(plan.paths.model_path)
    replayed = None if options.replay is None else read_mismatch(options.replay)
    with progress.phase("weights", seconds, "weights"):
        if plan.paths.seeded:
            ensure_seeded_weights(plan.model, plan.paths.weights_seed, weights)
    trainers = between == ENGINES
    with running_cluster(plan, report, progress, trainers=trainers) as cluster:
        session = Session(cluster, plan)
        loop = Loop(plan, session, report, progress, weights, parity_only=True)
        unequal = _start(session, report, progress, weights, between)
        step = 0 if replayed is None else int(replayed["step"])
        passes = Passes(loop, session, step, between)
        with progress.phase("a pass without taps", seconds, "plain"):
            batch = passes.plain(None if replayed is None else expected_from(replayed))
        flow = _flow(plan, between)
        if options.sweep:
            return sweep(plan, passes, batch, flow, progress, options.sweep)
        with progress.phase("a pass with taps", seconds, "digests"):
            ours, theirs = passes.recorded()
        slots = TokenSlots(batch.tokens, batch.prompt_lengths)
        with progress.phase("comparing", seconds, "compare"):
            result = compare_rows(ours, theirs, side_sizes(between, plan.layout), flow, slots)
        magnified = Magnified()
        if result.found is not None:
            with progress.phase("a pass that stores the differing rows", seconds, "rows"):
                magnified = magnify(plan, passes, result, slots, weights)
    data = {
        "weights": unequal,
        "record_bytes": {
            "digests": sum(record.digest_bytes for record in (*ours, *theirs)),
            "rows": magnified.row_bytes,
        },
        **_data(plan, report, between, batch, result, magnified, slots),
    }
    if result.found is None:
        if unequal is not None:
            raise GateClosed(f"no row differs, and yet {unequal}")
        if between == ENGINES or plan.run.temperature == 1.0:
            passes.check_returned()
        message = (
            f"equal: {result.rows} token rows of {len(result.ops)} tensors compared, embedding to "
            f"{flow.places[-1].op}, {len(slots)} tokens of {len(batch)} sequences; none differs"
        )
        return data, message, EXACT
    text = sentence(data["first_divergence"], between)
    return data, text if unequal is None else f"{text}; {unequal}", GATE


def _start(
    session: Session, report: Report, progress: Progress, weights: Path, between: Sides
) -> str | None:
    """Both roles up and their fingerprints compared; what is unequal about their weights, which
    here is something to look into and no reason to stop."""
    trainers = between == ENGINES
    with progress.phase("starting engine and trainer", report.start_seconds, "roles"):
        session.start(str(weights), trainers=trainers)
    with progress.phase("comparing fingerprints", report.start_seconds, "fingerprint"):
        fingerprints = session.fingerprints()
        report.fingerprint = dict(zip(between, fingerprints.values(), strict=True))
        if trainers:
            try:
                session.digests()
            except GateClosed as unequal:
                return str(unequal)
    return None


def _flow(plan: LaunchPlan, between: Sides) -> Flow:
    model = plan.model
    places = data_flow(model.num_hidden_layers, model.qk_layernorm)
    if between == PHASES and plan.run.temperature != 1.0:
        # The engine scores prompts at temperature 1, whatever was sampled at.
        places = tuple(p for p in places if p.op not in ("temperature", "logprob"))
    return Flow(places, model.num_hidden_layers, model.qk_layernorm)


def _data(
    plan: LaunchPlan,
    report: Report,
    between: Sequence[str],
    batch: Batch,
    result: Comparison,
    magnified: Magnified,
    slots: TokenSlots,
) -> dict[str, Any]:
    heat = heat_map(result, plan.model.num_hidden_layers, slots)
    first = None
    if result.found is not None:
        first = first_divergence(result.found, slots, magnified.element)
        if first["side"] is None and magnified.guilty is not None:
            (first["side"], first["rank"]), first["judged_by"] = magnified.guilty, "reference"
        first["look_at"] = look_at(result.found.place, plan, between, report.versions)
        place_of = {tuple(token): i for i, token in enumerate(heat["tokens"])}
        for token, counts in magnified.elements.items():
            heat["elements_differ"][place_of[token]] = counts
    return {
        "first_divergence": first,
        "ops": [{**op.place.data(), "rows": op.compared, "differ": op.differ} for op in result.ops],
        "tokens": batch.tokens,
        "prompt_lengths": batch.prompt_lengths,
        "heat": heat if result.found is not None else None,
        "ulp": magnified.ulp,
    }
