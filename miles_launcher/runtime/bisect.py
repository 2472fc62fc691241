"""`run_bisect`: one batch through both engines with taps on, and where they first differ.

Three passes over the same prompts and seeds. The first, without taps, samples the batch. The second
records a digest of every token row at every op; tokens and logprobs must be those of the first, bit
for bit, so that what is compared is what a launch runs. Where a row differs, a third pass stores
the rows of that op and token whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..parity.bisect import (
    BISECT_FILE,
    Element,
    Found,
    OpRows,
    compare_rows,
    divergence_data,
    first_element,
    kept_rows,
    sentence,
)
from ..parity.gate import GateClosed
from ..parity.report import Report
from ..parity.rows import RankRecord, TokenSlots, data_flow
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
    start_session,
)
from .loop import Loop, rollout_logprobs
from .progress import Progress
from .rollout import TAP_REQUEST
from .session import Session


def run_bisect(plan_path: Path) -> int:
    """Run the plan in `plan_path`; returns 0 equal, 3 a divergence, 2 configuration, 4 a process
    died, 130 interrupted. `bisect.json` beside the plan says which; only a comparison that came to
    its end has `first_divergence` in it."""
    plan = read(plan_path)
    report = new_report(plan)
    progress = Progress(report)
    data: dict[str, Any] = {}
    try:
        with progress:
            data, message = _bisect(plan, report, progress)
        code = EXACT if data["first_divergence"] is None else GATE
        ended = "complete"
    except GateClosed as closed:
        ended, code, message = "gate closed", GATE, str(closed)
    except ProcessDied as died:
        ended, code, message = "process died", DIED, str(died)
    except ValueError as error:
        ended, code, message = "configuration", CONFIGURATION, str(error)
    except KeyboardInterrupt:
        ended, code, message = "interrupted", INTERRUPTED, "interrupted; every process was ended"
    path = _write(plan, report, {"ended": ended, "message": message, "exit_code": code, **data})
    if ended != "complete":
        progress.console.print(f"{ended}: {message}", markup=False, soft_wrap=True)
    else:
        progress.console.print(message, markup=False, soft_wrap=True)
    progress.console.print(f"report: {path}", markup=False, soft_wrap=True)
    return code


def _write(plan: LaunchPlan, report: Report, data: dict[str, Any]) -> Path:
    about = {
        name: getattr(report, name)
        for name in ("model", "contract", "segments", "layout", "device", "versions")
    }
    text = json.dumps(
        {**about, "fingerprint": report.fingerprint, "seconds": report.start_seconds, **data},
        indent=2,
        allow_nan=False,
    )
    path = Path(plan.paths.out) / BISECT_FILE
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.rename(path)
    return path


def _bisect(plan: LaunchPlan, report: Report, progress: Progress) -> tuple[dict[str, Any], str]:
    """(the rest of bisect.json, the sentence)."""
    seconds = report.start_seconds
    weights = Path(plan.paths.model_path)
    with progress.phase("weights", seconds, "weights"):
        if plan.paths.seeded:
            ensure_seeded_weights(plan.model, plan.paths.weights_seed, weights)
    with running_cluster(plan, report, progress) as cluster:
        session = Session(cluster, plan)
        loop = Loop(plan, session, report, progress, weights, parity_only=True)
        start_session(session, report, progress, weights)
        passes = _Passes(loop, session)
        with progress.phase("a pass without taps", seconds, "plain"):
            batch = passes.plain()
        with progress.phase("a pass with taps", seconds, "digests"):
            rollout, trainer = passes.recorded()
        slots = TokenSlots(batch.tokens, batch.prompt_lengths)
        sizes = (plan.layout.rollout_tp, plan.layout.train_tp)
        flow = data_flow(plan.model.num_hidden_layers, plan.model.qk_layernorm)
        with progress.phase("comparing", seconds, "compare"):
            ops, found = compare_rows(rollout, trainer, sizes, flow, slots)
        element: Element | None = None
        if found is not None:
            with progress.phase("a pass that stores the differing row", seconds, "rows"):
                element = passes.element(found, slots)
    if found is None:
        rows = sum(op.compared for op in ops)
        message = (
            f"equal: {rows} token rows of {len(ops)} ops compared, embedding to logprob, "
            f"{len(slots)} tokens of {len(batch)} sequences; none differs"
        )
    else:
        message = sentence(found, element)
    return _data(batch, ops, found, element), message


def _data(
    batch: Batch, ops: Sequence[OpRows], found: Found | None, element: Element | None
) -> dict[str, Any]:
    return {
        "first_divergence": None if found is None else divergence_data(found, element),
        "ops": [
            {"layer": op.place.layer, "op": op.place.op, "rows": op.compared, "differ": op.differ}
            for op in ops
        ],
        "tokens": batch.tokens,
        "prompt_lengths": batch.prompt_lengths,
    }


class _Passes:
    """The same batch again and again; a pass that comes out otherwise is an error."""

    def __init__(self, loop: Loop, session: Session) -> None:
        self._loop, self._session = loop, session
        self._number = 0
        self._batch: Batch
        self._logprobs: tuple[list[Any], list[Any]]

    def _run(self) -> tuple[Batch, tuple[list[Any], list[Any]]]:
        self._number += 1
        _, generations, batch = self._loop.sample(0, lambda i: f"{TAP_REQUEST}{i}-{self._number}")
        return batch, (rollout_logprobs(generations), self._session.score(batch))

    def plain(self) -> Batch:
        """Without taps; the batch that every further pass must repeat."""
        self._batch, self._logprobs = self._run()
        return self._batch

    def recorded(self, keep: str | None = None) -> tuple[list[RankRecord], list[RankRecord]]:
        """With taps: the records of rollout and trainer. `GateClosed` where tokens or logprobs
        are not those of the pass without."""
        self._session.start_taps(keep)
        batch, logprobs = self._run()
        records = self._session.finish_taps()
        if batch != self._batch:
            raise GateClosed("the rollout sampled other tokens from the same prompts and seeds")
        for side, first, again in zip(
            ("rollout", "trainer"), self._logprobs, logprobs, strict=True
        ):
            if _bytes(first) != _bytes(again):
                raise GateClosed(f"the {side}'s logprobs of the same tokens did not repeat")
        return records

    def element(self, found: Found, slots: TokenSlots) -> Element | None:
        """The first differing element of the row that was found, from a pass that stores it."""
        token = (found.sequence, found.position)
        # A cached token was computed by another sequence with the same prefix.
        tokens = [token, *(t for t in slots.same_prefix(found.slot) if t != token)]
        names = ";".join(f"{sequence},{position}" for sequence, position in tokens)
        rollout, trainer = self.recorded(f"{found.place.tap.replace('.', ':')}:{names}")
        return first_element(kept_rows(rollout, tokens), kept_rows(trainer, [token]))


def _bytes(logprobs: Sequence[Any]) -> bytes:
    return b"|".join(np.asarray(row, dtype=np.float32).tobytes() for row in logprobs)
