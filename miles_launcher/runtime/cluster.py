"""Ray: connect or start, place the roles, wait for many calls at once, leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..parity.gate import GateClosed
from .logs import last_lines
from .memory import alive

_OBJECT_STORE_BYTES = 256 << 20
_POLL_SECONDS = 2.0
_CONNECT_SECONDS = 10.0
_SOCKET_PATH_BYTES = 107


class ProcessDied(Exception):
    """A process of the run is gone, or did not come up in time. Exit code 4."""


@dataclass(slots=True)
class Role:
    """One actor: its name for messages, its handle, its log, the processes that belong to it."""

    name: str
    actor: Any
    log_path: Path
    pids: list[int] = field(default_factory=list)


class Cluster:
    """The Ray session of one run. Use as a context manager: leaving it ends every process that
    was started, by id."""

    def __init__(
        self,
        *,
        device: str,
        num_gpus: int,
        colocate: bool,
        ranks: tuple[int, int],
        num_engines: int = 1,
    ):
        """ranks: of all engines together, and of the trainer."""
        self._device = device
        self._num_gpus = num_gpus
        self._colocate = colocate
        self._rollout_ranks, self._train_ranks = ranks
        self._engine_ranks = self._rollout_ranks // num_engines
        self._group: Any = None
        self.roles: list[Role] = []

    def __enter__(self) -> Cluster:
        import ray

        _check_temporary_folder()
        # Ray warns, or worse hides devices from processes that reserve none; the roles are given
        # theirs by name in the environment.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        address = os.environ.get("RAY_ADDRESS")
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address:
            _check_reachable(address)
            try:
                ray.init(address=address, **options)
            except (ConnectionError, RuntimeError) as error:
                # A wrong address, another release of Ray, a token that the cluster asks for.
                raise ValueError(
                    f"RAY_ADDRESS={address}: cannot join this cluster with Ray {ray.__version__}: "
                    f"{error.__cause__ or error}"
                ) from error
        else:
            try:
                ray.init(
                    address="local",
                    num_cpus=max(os.cpu_count() or 1, self._bundles()),
                    num_gpus=self._num_gpus if self._device == "cuda" else 0,
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES if self._device == "cpu" else None,
                    **options,
                )
            except OSError as error:
                folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
                raise ValueError(
                    f"Ray cannot keep its session in {folder}: {error}. Name a short folder that "
                    "can be written to: export TMPDIR=/tmp, or RAY_TMPDIR for Ray alone"
                ) from error
        return self

    def _bundles(self) -> int:
        if self._colocate:
            return max(self._rollout_ranks, self._train_ranks)
        return self._rollout_ranks + self._train_ranks

    def place(self, timeout: float) -> None:
        """Reserve one bundle a rank, on as few nodes as possible.

        Raises `ProcessDied` saying what the cluster holds where it cannot give that in `timeout`
        seconds.
        """
        import ray
        from ray.util.placement_group import placement_group

        bundle = {"CPU": 1, "GPU": 1} if self._device == "cuda" else {"CPU": 1}
        self._group = placement_group([bundle] * self._bundles(), strategy="PACK")
        ready, _ = ray.wait([self._group.ready()], timeout=timeout)
        if not ready:
            raise ProcessDied(
                f"the cluster did not give {self._bundles()} x {bundle} within {timeout:.0f} s; it "
                f"has {ray.cluster_resources()}, of which free: {ray.available_resources()}"
            )

    def gpu_ids(self) -> list[tuple[str, str]]:
        """(node id, GPU id) of every bundle, in order; empty on a CPU."""
        import ray

        if self._device != "cuda":
            return []

        @ray.remote(num_cpus=0, num_gpus=1, max_retries=0)
        def probe() -> tuple[str, str]:
            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_accelerator_ids()["GPU"][0]

        return ray.get(
            [
                probe.options(scheduling_strategy=self._strategy(index)).remote()
                for index in range(self._bundles())
            ]
        )

    def _strategy(self, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=bundle
        )

    def rollout_bundles(self, engine: int) -> list[int]:
        """The bundles of one engine's ranks."""
        first = engine * self._engine_ranks
        return list(range(first, first + self._engine_ranks))

    def trainer_bundle(self, rank: int) -> int:
        """The bundle of one trainer rank; shared with the engine where colocated."""
        return rank if self._colocate else self._rollout_ranks + rank

    def shared_gpus(self) -> list[int]:
        """For each of the engine's ranks the trainer rank whose GPU memory it can map: the one on
        its own GPU, or rank 0 on the same host. Empty where the two sides share no GPU."""
        if self._device != "cuda" or not self._colocate:
            return []
        return [rank if rank < self._train_ranks else 0 for rank in range(self._rollout_ranks)]

    def start(self, name: str, actor_class: type, bundle: int, log_path: Path, *args: Any) -> Role:
        """Start one actor in a bundle, without reserving devices: its environment names them."""
        import ray

        remote = ray.remote(num_cpus=0, num_gpus=0, max_restarts=0)(actor_class)
        actor = remote.options(scheduling_strategy=self._strategy(bundle)).remote(
            *args, str(log_path)
        )
        role = Role(name, actor, log_path)
        self.roles.append(role)
        return role

    def wait(self, calls: Sequence[tuple[Role, Any]], *, timeout: float | None = None) -> list[Any]:
        """Results of one call per role, in order; raises as soon as one of them fails.

        Waiting for the first in order would hang on a rank that waits for a dead one. Raises
        `ProcessDied` with the role's last log lines when its process is gone, its code failed, or
        nothing came in `timeout` seconds. What it refused (`ValueError`) and a gate it closed come
        through as themselves.
        """
        import ray

        owners = {ref: role for role, ref in calls}
        results: dict[Any, Any] = {}
        pending = [ref for _, ref in calls]
        deadline = None if timeout is None else time.monotonic() + timeout
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=_POLL_SECONDS)
            for ref in ready:
                results[ref] = self._result(owners[ref], ref)
            if not ready and deadline is not None and time.monotonic() > deadline:
                late = [owners[ref] for ref in pending]
                raise ProcessDied(
                    f"no answer within {timeout:.0f} s from "
                    + ", ".join(role.name for role in late)
                    + _quote(late[0])
                )
        return [results[ref] for _, ref in calls]

    def call(self, role: Role, ref: Any, *, timeout: float | None = None) -> Any:
        """The result of one call; see `wait`."""
        return self.wait([(role, ref)], timeout=timeout)[0]

    def _result(self, role: Role, ref: Any) -> Any:
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, GateClosed):
                raise GateClosed(f"{role.name}: {cause}") from error
            if isinstance(cause, ValueError):
                raise ValueError(f"{role.name}: {cause}") from error
            raise ProcessDied(f"{role.name} failed: {cause!r}{_quote(role)}") from error
        except ray.exceptions.RayActorError:
            raise ProcessDied(f"{role.name} died{_quote(role)}") from None

    def __exit__(self, *_: object) -> None:
        # A second Ctrl-C must not leave half of the processes behind.
        previous = {
            number: signal.signal(number, signal.SIG_IGN)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            self._end()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _end(self) -> None:
        import ray

        shutdowns = [role.actor.shutdown.remote() for role in self.roles]
        if shutdowns:
            ray.wait(shutdowns, num_returns=len(shutdowns), timeout=20)
        for role in self.roles:
            ray.kill(role.actor, no_restart=True)
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
        ray.shutdown()
        end_processes([pid for role in self.roles for pid in role.pids])


def _check_temporary_folder() -> None:
    """Handles to shared weights pass through sockets of `multiprocessing` in the temporary folder;
    a scheduler's TMPDIR is often too long for one, which would show in the first sync only."""
    folder = tempfile.gettempdir()
    length = len(os.fsencode(f"{folder}/pymp-12345678/listener-12345678"))
    if length > _SOCKET_PATH_BYTES:
        raise ValueError(
            f"TMPDIR {folder}: the path of a socket in it would have {length} bytes, at most "
            f"{_SOCKET_PATH_BYTES} are possible; name a shorter folder: export TMPDIR=/tmp"
        )


def _check_reachable(address: str) -> None:
    """`ValueError` where nothing listens at HOST:PORT: Ray itself would end this process, without a
    word to the caller, once its own patience is over. Other forms of address are Ray's to judge."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ValueError(
            f"RAY_ADDRESS={address}: nothing answers there ({error}); unset it to start Ray on "
            "this machine"
        ) from None


def end_processes(pids: Sequence[int], patience: float = 10.0) -> None:
    """Wait for processes of ours on this machine to end; kill, by id, those that do not."""
    deadline = time.monotonic() + patience
    while (left := alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _quote(role: Role) -> str:
    lines = last_lines(role.log_path)
    if not lines:
        return f" (its log is {role.log_path} on its node)"
    return f"; the end of {role.log_path}:\n" + "\n".join(f"    {line}" for line in lines)
