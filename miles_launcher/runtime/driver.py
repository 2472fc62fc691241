"""`run_launch`: from a written plan to an exit code, with a report whatever happens."""

from __future__ import annotations

import importlib.metadata
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ..bisection import ENGINES, bisection_plan, replay_command
from ..parity.gate import GateClosed
from ..parity.report import REPORT_FILE, Report, read_steps
from ..plan import LaunchPlan, read, write
from ..policy import CONTRACT_OFF
from ..resolve import LaunchArgs
from ..seeded_weights import ensure_seeded_weights
from .checkpoints import newest_checkpoint
from .cluster import Cluster, ProcessDied
from .events import StepEvents
from .loop import Loop
from .progress import Progress, show_end
from .session import Session

BISECT_FOLDER = "bisect"
EXACT, CONFIGURATION, GATE, DIED, INTERRUPTED = 0, 2, 3, 4, 130
_VERSIONS = ("miles-launcher", "sglang", "megatron-core", "torch", "triton", "ray")


def run_launch(plan_path: Path, parity_only: bool, bisect_on_mismatch: bool = False) -> int:
    """Run the plan in `plan_path`; returns 0 exact, 2 configuration, 3 gate closed, 4 a process
    died, 130 interrupted. `report.json` beside the plan is complete in every case. Where the gate
    closed over a token, says how to bisect that batch, or does it."""
    plan = read(plan_path)
    out = Path(plan.paths.out)
    report = new_report(plan)
    progress = Progress(report)
    try:
        with progress:
            _run(plan, report, progress, out, parity_only)
        report.finish("complete", EXACT)
    except GateClosed as closed:
        report.finish("gate closed", GATE, str(closed))
    except ProcessDied as died:
        report.finish("process died", DIED, str(died))
    except ValueError as error:
        report.finish("configuration", CONFIGURATION, str(error))
    except KeyboardInterrupt:
        report.finish("interrupted", INTERRUPTED, "interrupted; every process was ended")
    path = report.write(out)
    show_end(report, progress.console, path)
    assert report.exit_code is not None
    if report.ended == "gate closed" and plan.contract != CONTRACT_OFF:
        _after_mismatch(report, progress, out, bisect_on_mismatch)
    return report.exit_code


def _after_mismatch(report: Report, progress: Progress, out: Path, bisect: bool) -> None:
    if not report.steps or not report.steps[-1].mismatched_tokens:
        return
    progress.console.print(
        f"this very batch, op by op: {replay_command(out)}", markup=False, soft_wrap=True
    )
    if not bisect:
        return
    from .bisect import BisectOptions, run_bisect

    folder = out / BISECT_FOLDER
    try:
        resolved, sides, _ = bisection_plan(
            LaunchArgs(model="", out=folder), ",".join(ENGINES), out
        )
        path = write(resolved, folder)
    except (ValueError, OSError) as error:
        # The run has ended as its report says; that stays its exit code.
        progress.console.print(f"not bisected: {error}", markup=False, soft_wrap=True)
        return
    run_bisect(path, BisectOptions(between=sides, replay=out))


def new_report(plan: LaunchPlan) -> Report:
    """An empty report that says what is going to run."""
    layout = plan.layout
    return Report(
        model=plan.model.name,
        contract=plan.contract,
        segments=plan.segments,
        layout={
            "rollout_tp": layout.rollout_tp,
            "train_tp": layout.train_tp,
            "pp": layout.pp,
            "cp": layout.cp,
            **({"engines": plan.engine.num_engines} if plan.engine.num_engines > 1 else {}),
        },
        device=plan.device,
        versions={name: importlib.metadata.version(name) for name in _VERSIONS},
        steps_planned=plan.run.steps,
    )


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(
    plan: LaunchPlan, report: Report, progress: Progress, out: Path, parity_only: bool
) -> None:
    resumed = newest_checkpoint(out) if plan.resume else None
    model_path = Path(plan.paths.model_path)
    with progress.phase("weights", report.start_seconds, "weights"):
        if plan.paths.seeded:
            ensure_seeded_weights(plan.model, plan.paths.weights_seed, model_path)
    if plan.resume and (out / REPORT_FILE).is_file():
        done = 0 if resumed is None else resumed[0]
        report.steps = read_steps(out)[:done]
    weights = model_path if resumed is None else resumed[1]
    report.write(out)
    events = StepEvents(out)
    try:
        with running_cluster(plan, report, progress) as cluster:
            session = Session(cluster, plan)
            loop = Loop(plan, session, report, progress, weights, parity_only=parity_only)
            start_session(session, report, progress, weights, resumed and resumed[1])
            report.write(out)
            loop.run(events)
            report.peak_memory_bytes = session.peak_memory()
    finally:
        events.close()


@contextmanager
def running_cluster(
    plan: LaunchPlan, report: Report, progress: Progress, *, trainers: bool = True
) -> Iterator[Cluster]:
    """Ray for the body, and no process of ours after it. trainers: whether there are any."""
    cluster = Cluster(
        device=plan.device,
        num_gpus=plan.num_gpus or 0,
        colocate=plan.cluster.colocate,
        ranks=(
            plan.layout.rollout_tp * plan.engine.num_engines,
            plan.trainer.world_size if trainers else 0,
        ),
        num_engines=plan.engine.num_engines,
    )
    with progress.phase("starting ray", report.start_seconds, "ray"):
        cluster.__enter__()
        # SIGTERM ends a run as Ctrl-C does: processes ended, report written. Set here because
        # Ray, when it starts, puts a handler of its own that ends the process on the spot.
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield cluster
    finally:
        with progress.phase("ending processes", report.start_seconds, "end"):
            cluster.__exit__()


def start_session(
    session: Session,
    report: Report,
    progress: Progress,
    weights: Path,
    optimizer: Path | None = None,
) -> None:
    """Start both roles from `weights` (and the optimizer saved in a folder), and compare what they
    report before the first token."""
    with progress.phase("starting engine and trainer", report.start_seconds, "roles"):
        session.start(str(weights))
        if optimizer is not None:
            session.restore_optimizer(optimizer)
    with progress.phase("comparing fingerprints", report.start_seconds, "fingerprint"):
        report.fingerprint = session.fingerprints()
        session.digests()
