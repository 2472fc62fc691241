"""The gate's runner: one process a configuration, what is whole is kept, the verdict at the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..layout import Layout
from ..plan import LaunchPlan, write
from ..policy import CONTRACT_OFF, Device
from ..resolve import LaunchArgs, resolve
from ..schema import get_contract
from . import machine
from .configurations import CONTROL_GROUPS, Configuration
from .results import (
    INDEX_FILE,
    ConfigurationResult,
    GroupResult,
    cross_checks,
    entries,
    read_result,
    reusable,
    verdict,
    write_json,
)
from .sizes import FULL, SMALL, Sizes

EXACT, INCOMPLETE, NOT_RUN, CLOSED, DIED, INTERRUPTED = 0, 1, 2, 3, 4, 130
# What a start may take at least: with less time left, none is begun.
_LEAST_SECONDS = 60.0
_PATIENCE = 45.0
# Tokens of key-value cache: more than the longest batch of a group, and little beside the trainer.
_POOL_TOKENS = 100_000
_REWARD = "miles_launcher.gpu_gate.reward:even_share"
Start = Callable[[LaunchPlan, Path, Configuration, Sequence[str], str], "subprocess.Popen[bytes]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """One run of the gate. seconds: its whole budget (None: no limit); scratch: where the runs'
    folders go (plans, logs)."""

    model: str
    device: Device
    gpus: int
    out: Path
    scratch: Path
    min_tokens: int
    seconds: float | None = None
    small: bool = False

    @property
    def sizes(self) -> Sizes:
        return SMALL if self.small else FULL


def launch_args(configuration: Configuration, options: GateOptions, out: Path) -> LaunchArgs:
    """What a configuration would be on the command line of `miles`."""
    sizes, layout = options.sizes, configuration.layout
    prompts, samples, new_tokens = sizes.training
    if "bisect" in configuration.groups and "training" not in configuration.groups:
        # Taps record every row of every op: a small batch says as much.
        prompts, samples, new_tokens = 2, 1, 8
    micro = min(8, prompts * samples)
    overrides = [
        f"run.prompts_per_step={prompts}",
        f"run.samples_per_prompt={samples}",
        f"run.max_new_tokens={new_tokens}",
        "run.checkpoint_every=-1",
        f"train.micro_batch_size={micro}",
        "train.micro_batch_tokens=0",
        f"rollout.num_engines={configuration.num_engines}",
        f"rollout.chunked_prefill_size={sizes.chunk_size if configuration.chunked else -1}",
        *configuration.overrides,
    ]
    if options.device == "cuda":
        # A pool of known size: what the trainer has taken when it is made depends on who is first.
        overrides += [
            "rollout.mem_fraction_static=0.85",
            f"rollout.max_total_tokens={_POOL_TOKENS}",
        ]
    return LaunchArgs(
        model=options.model,
        rollout_tp=layout.rollout_tp,
        train_tp=layout.train_tp,
        pp=layout.pp,
        cp=layout.cp,
        contract=configuration.contract,
        device=options.device,
        reward=_REWARD,
        steps=1 if configuration.control else 3,
        out=out,
        overrides=tuple(overrides),
    )


def start_session(
    plan: LaunchPlan, out: Path, configuration: Configuration, groups: Sequence[str], sizes: str
) -> subprocess.Popen[bytes]:
    """The process of one configuration, in a session of its own."""
    path = write(plan, Path(plan.paths.out))
    # Also from a checkout that nobody installed, and seen by the processes that Ray starts.
    root = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), root])
    command = [sys.executable, "-m", "miles_launcher.runtime.gate_session", str(path), str(out)]
    with (Path(plan.paths.out) / "session.log").open("wb") as log:
        return subprocess.Popen(
            [*command, configuration.name, sizes, *groups],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Not the repository: a folder named like a package would be found first.
            cwd=plan.paths.out,
            env={**os.environ, "PYTHONPATH": search},
        )


@dataclass(slots=True)
class Gate:
    """One run over several configurations. `say` prints a line; `start` begins a process."""

    options: GateOptions
    configurations: Sequence[Configuration]
    say: Callable[[str], None] = print
    start: Start = start_session
    results: list[ConfigurationResult] = field(default_factory=list)
    not_run: list[dict[str, str]] = field(default_factory=list)
    died: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def run(self) -> int:
        """All configurations; the index is complete whatever happens. Returns the exit code."""
        options = self.options
        options.out.mkdir(parents=True, exist_ok=True)
        text, releases = machine.source_digest(), machine.versions()
        code = EXACT
        try:
            for configuration in self.configurations:
                self._configuration(configuration, text, releases)
                self._index(None)
        except KeyboardInterrupt:
            code = INTERRUPTED
        return self._index(code)

    def collect(self) -> int:
        """The index of what lies in the folder, nothing started. Returns the exit code.

        Raises `ValueError` where there is nothing, or results of different text, releases, model
        or machine: one index is about one of each.
        """
        found = [read_result(self.options.out, c.name) for c in self.configurations]
        self.results = [result for result in found if result is not None]
        keys = ("model", "device", "sizes", "source_digest", "versions")
        identities = {
            str([result.identity[key] for key in keys]): result.name for result in self.results
        }
        if len(identities) != 1:
            raise ValueError(
                f"{self.options.out}: {len(self.results)} results of {len(identities)} kinds of "
                f"model, machine, text and releases ({', '.join(identities.values())}); one index "
                "is about one"
            )
        return self._index(EXACT)

    def _left(self) -> float | None:
        if self.options.seconds is None:
            return None
        return self.options.seconds - (time.monotonic() - self._began)

    def _configuration(
        self, configuration: Configuration, text: str, releases: dict[str, str | None]
    ) -> None:
        options, name = self.options, configuration.name
        run_folder = options.scratch / name
        shutil.rmtree(run_folder, ignore_errors=True)
        try:
            plan = resolve(launch_args(configuration, options, run_folder))
        except ValueError as error:
            self.not_run.append({"name": name, "reason": f"refused: {error}"})
            self.say(f"{name}: refused: {error}")
            return
        result = _new_result(configuration, options, plan, text, releases)
        kept = reusable(read_result(options.out, name), result.identity, options.min_tokens)
        result.groups = [group for group in kept if group.name in configuration.groups]
        for group in result.groups:
            self.say(f"{name}:{group.name}: kept from an earlier run")
        done = {group.name for group in result.groups}
        missing = [group for group in configuration.groups if group not in done]
        self.results.append(result)
        if not missing:
            result.ended = "complete"
            result.write(options.out)
            return
        left = self._left()
        if left is not None and left < _LEAST_SECONDS:
            # An earlier file stays as it is: it may hold groups of another text.
            if not result.groups:
                self.results.pop()
            self.not_run.append({"name": name, "reason": f"{left:.0f} s were left"})
            self.say(f"{name}: not run, {max(0.0, left):.0f} s were left")
            return
        result.write(options.out)
        self.say(f"{name}: starting for {', '.join(missing)}")
        began = time.monotonic()
        process = self.start(
            plan, options.out, configuration, missing, "small" if options.small else "full"
        )
        try:
            self._watch(process, name, done, left)
        finally:
            self.results[-1] = read_result(options.out, name) or result
        self._ended(self.results[-1], missing, process.returncode, time.monotonic() - began)

    def _watch(
        self, process: subprocess.Popen[bytes], name: str, done: set[str], left: float | None
    ) -> None:
        """Say each group as it ends; end the process where the time is over."""
        deadline = None if left is None else time.monotonic() + left
        said = set(done)
        try:
            while process.poll() is None:
                time.sleep(0.5)
                self._say_groups(name, said)
                if deadline is not None and time.monotonic() > deadline:
                    self.not_run.append({"name": name, "reason": "ended: the time was over"})
                    break
        finally:
            if process.poll() is None:
                _end(process)
            self._say_groups(name, said)

    def _say_groups(self, name: str, said: set[str]) -> None:
        found = read_result(self.options.out, name)
        for group in [] if found is None else found.groups:
            if group.name not in said:
                said.add(group.name)
                self.say(f"{name}:{group.name}: {_line(group, self.options.min_tokens)}")
                if found is not None:
                    self.results[-1] = found
                self._index(None)

    def _ended(
        self, result: ConfigurationResult, missing: Sequence[str], code: int, seconds: float
    ) -> None:
        options, name = self.options, result.name
        absent = [group for group in missing if result.group(group) is None]
        self.say(f"{name}: {result.ended}, exit code {code}, {seconds:.0f} s {result.message}")
        stopped = any(entry["name"] == name for entry in self.not_run)
        if absent and not stopped:
            # What could not run is no claim; but a closed gate or a dead process is an answer.
            self.died.append(f"{name}: {', '.join(absent)} did not run: {result.ended}")
            if result.ended == "gate closed":
                group = GroupResult(name=absent[0], control=absent[0] in CONTROL_GROUPS)
                group.failures.append(result.message)
                result.groups.append(group)
                result.write(options.out)
            elif result.ended == "running":
                tail = (options.scratch / name / "session.log").read_text(errors="replace")[-2000:]
                result.ended, result.message = "process died", tail
                result.write(options.out)

    def _index(self, code: int | None) -> int:
        """Write the index; returns the exit code."""
        options = self.options
        checks = cross_checks(self.results)
        closed = verdict(self.results, checks, options.min_tokens)
        about = self.results[0].identity if self.results else {}
        if code in (None, EXACT):
            done = not self.not_run_in_time() and not self.died
            code = CLOSED if closed else EXACT if done else DIED if self.died else INCOMPLETE
        write_json(
            options.out / INDEX_FILE,
            {
                "model": options.model,
                "device": about.get("device") or machine.device_name(options.device),
                "gpus": options.gpus,
                "versions": about.get("versions"),
                "source_digest": about.get("source_digest"),
                "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "min_tokens": options.min_tokens,
                "sizes": asdict(options.sizes),
                "exit_code": code,
                "closed_by": closed,
                "died": self.died,
                "not_run": self.not_run,
                "seconds": round(time.monotonic() - self._began, 1),
                "configurations": entries(self.results),
                "checks": checks,
            },
        )
        assert code is not None
        return code

    def not_run_in_time(self) -> list[dict[str, str]]:
        """What a later run has to go on with; what a contract refuses is no part of it."""
        return [entry for entry in self.not_run if not entry["reason"].startswith("refused")]


def _line(group: GroupResult, min_tokens: int) -> str:
    kind = "control, " if group.control else ""
    problems = group.problems(min_tokens)
    return (
        f"{kind}{group.compared_tokens} tokens, {group.mismatched_tokens} differ, max |diff| "
        f"{group.max_abs_diff}, {group.seconds} s: " + ("; ".join(problems)[:600] or "as it has to")
    )


def _new_result(
    configuration: Configuration,
    options: GateOptions,
    plan: LaunchPlan,
    text: str,
    releases: dict[str, str | None],
) -> ConfigurationResult:
    layout = configuration.layout
    return ConfigurationResult(
        name=configuration.name,
        layout=_layout(layout, configuration.num_engines),
        contract=configuration.contract,
        control=configuration.control,
        identity={
            "model": options.model,
            "device": machine.device_name(options.device),
            "order": _order(configuration, plan),
            "sizes": "small" if options.small else "full",
            "overrides": list(plan.overrides),
            "source_digest": text,
            "versions": releases,
        },
        versions=releases,
    )


def _order(configuration: Configuration, plan: LaunchPlan) -> str:
    """What of the layout sets the numbers, by the contract."""
    if configuration.contract == CONTRACT_OFF:
        return "stock"
    if get_contract(configuration.contract).row_linear.order == "segments":
        return f"segments={plan.segments}"
    return f"rollout_tp={plan.layout.rollout_tp}"


def _layout(layout: Layout, num_engines: int) -> dict[str, int]:
    return {**asdict(layout), "engines": num_engines}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the session to end as Ctrl-C does; after a while, kill it and what it started."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def table(results: Sequence[dict[str, Any]]) -> str:
    """The entries of an index, one a line."""
    lines = [f"{'configuration':34} {'contract':5} {'tokens':>7} {'differ':>7} {'max |diff|':>11}"]
    for entry in results:
        contract = entry["contract"].rpartition("_")[2]
        lines.append(
            f"{entry['name']:34} {contract:5} {entry['compared_tokens']:7} "
            f"{entry['mismatched_tokens']:7} {entry['max_abs_diff']!s:>11.11}"
            + ("  control" if entry["control"] else "")
        )
    return "\n".join(lines)
