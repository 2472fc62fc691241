"""One configuration of the gate: start the pair, run the missing groups, write each at once.

    python -m miles_launcher.runtime.gate_session PLAN.json RESULTS NAME SIZES GROUP...

RESULTS/NAME.json must exist: the groups in it are not run again. Exit codes as everywhere: 0 all
groups ran (what they found is in the file), 2 configuration, 3 the gate closed before a group could
run, 4 a process died, 130 interrupted.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..gpu_gate.results import ConfigurationResult, read_result
from ..gpu_gate.sizes import FULL, SMALL
from ..parity.gate import GateClosed
from ..parity.report import Report
from ..plan import LaunchPlan, read
from ..seeded_weights import ensure_seeded_weights
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
from .gate_groups import Pair, run_group
from .progress import Progress
from .session import Session

_PR_SET_PDEATHSIG = 1
SIZES = {"full": FULL, "small": SMALL}


def main(arguments: Sequence[str]) -> int:
    """See the module."""
    _end_with_parent()
    plan = read(Path(arguments[0]))
    out, name, sizes, groups = Path(arguments[1]), arguments[2], arguments[3], arguments[4:]
    result = read_result(out, name)
    assert result is not None, f"{out / name}.json is missing"
    report = new_report(plan)
    progress = Progress(report, steps=False)
    try:
        with progress:
            _run(plan, result, report, progress, out, sizes, groups)
        result.ended, code = "complete", EXACT
    except GateClosed as closed:
        result.ended, result.message, code = "gate closed", str(closed), GATE
    except ProcessDied as died:
        result.ended, result.message, code = "process died", str(died), DIED
    except ValueError as error:
        result.ended, result.message, code = "configuration", str(error), CONFIGURATION
    except KeyboardInterrupt:
        result.ended, result.message, code = "interrupted", "interrupted", INTERRUPTED
    result.start_seconds |= report.start_seconds
    result.write(out)
    return code


def _end_with_parent() -> None:
    """Be ended as by SIGTERM where the gate's process is killed: nobody else would."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _run(
    plan: LaunchPlan,
    result: ConfigurationResult,
    report: Report,
    progress: Progress,
    out: Path,
    sizes: str,
    groups: Sequence[str],
) -> None:
    weights = Path(plan.paths.model_path)
    with progress.phase("weights", report.start_seconds, "weights"):
        if plan.paths.seeded:
            ensure_seeded_weights(plan.model, plan.paths.weights_seed, weights)
    with running_cluster(plan, report, progress) as cluster:
        session = Session(cluster, plan)
        start_session(session, report, progress, weights)
        result.fingerprint, result.start_seconds = report.fingerprint, report.start_seconds
        result.write(out)
        pair = Pair(
            session=session,
            plan=plan,
            sizes=SIZES[sizes],
            report=report,
            progress=progress,
            weights=weights,
        )
        for name in groups:
            began = time.monotonic()
            found = run_group(name, pair)
            found.seconds = round(time.monotonic() - began, 1)
            result.groups = [g for g in result.groups if g.name != name] + [found]
            result.write(out)
        result.peak_memory_bytes = session.peak_memory()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
