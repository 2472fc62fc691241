"""The started system: the rollout engines, the trainer ranks, and what the driver asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..conformance.live import check_live
from ..parity.gate import check_arguments, check_readbacks, check_weights
from ..parity.rows import RankRecord
from ..plan import LaunchPlan
from ..policy import CONTRACT_OFF
from .batch import Batch
from .cluster import Cluster, Role
from .rollout import Generation, RolloutEngine
from .trainer import TrainerActor, rank_config

LOGS = "logs"


class Session:
    """Handles of the roles. Every call ends in a result, `ProcessDied`, or `GateClosed`."""

    def __init__(self, cluster: Cluster, plan: LaunchPlan) -> None:
        self._cluster = cluster
        self._plan = plan
        self.patched = plan.contract != CONTRACT_OFF
        self._engines: list[Role] = []
        self._trainers: list[Role] = []

    def start(self, model_path: str, *, trainers: bool = True) -> None:
        """Start all roles together (without `trainers`: the engines alone) and wait until every one
        is up."""
        plan, cluster = self._plan, self._cluster
        timeout = plan.cluster.start_timeout
        cluster.place(timeout)
        gpus = cluster.gpu_ids()
        logs = Path(plan.paths.out) / LOGS
        several = plan.engine.num_engines > 1
        for number in range(plan.engine.num_engines):
            engine_bundles = cluster.rollout_bundles(number)
            role = cluster.start(
                f"rollout engine {number}" if several else "rollout",
                RolloutEngine,
                engine_bundles[0],
                logs / (f"rollout-{number}.log" if several else "rollout.log"),
                {**plan.rollout.env, **_visible(gpus, engine_bundles)},
            )
            self._engines.append(role)
        bundles = [cluster.trainer_bundle(rank) for rank in range(plan.trainer.world_size)]
        for rank, bundle in enumerate(bundles if trainers else []):
            role = cluster.start(
                f"trainer rank {rank}",
                TrainerActor,
                bundle,
                logs / f"trainer-{rank}.log",
                {**plan.trainer.env, **_visible(gpus, _on_node(gpus, bundles, bundle))},
            )
            self._trainers.append(role)
        roles = self._roles()
        pids = cluster.wait([(r, r.actor.pid.remote()) for r in roles], timeout=timeout)
        for role, pid in zip(roles, pids, strict=True):
            role.pids.append(pid)
        address, port = "", 0
        if trainers:
            first = self._trainers[0]
            address, port = cluster.call(first, first.actor.rendezvous.remote(), timeout=timeout)
        kwargs = {**plan.rollout.engine_kwargs, "model_path": model_path}
        starting = [(role, role.actor.start.remote(kwargs)) for role in self._engines]
        starting += [
            (
                role,
                role.actor.start.remote(
                    rank_config(
                        plan, rank, address, port, _on_node(gpus, bundles, bundle).index(bundle)
                    ),
                    model_path,
                ),
            )
            for rank, (role, bundle) in enumerate(zip(self._trainers, bundles, strict=False))
        ]
        started = cluster.wait(starting, timeout=timeout)
        for role, children in zip(self._engines, started, strict=False):
            role.pids += children

    def _roles(self) -> list[Role]:
        return [*self._engines, *self._trainers]

    def fingerprints(self) -> dict[str, Any]:
        """Both sides' fingerprints, once every rank reports an equal one."""
        live = self._on_engines("readback")
        for engine in live:
            check_arguments(self._plan.rollout.expected_readback, engine["arguments"])
        if not self.patched:
            return {}
        ranks = [rank for engine in live for rank in engine["ranks"]]
        # The engines alone: their ranks among themselves.
        theirs = self._on_trainers("readback") if self._trainers else ranks
        return self._certified(check_readbacks(ranks, theirs, self._rollout_ranks))

    def _certified(self, fingerprints: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The fingerprints, where the plan's certificate (if it has one) is about these ranks."""
        if self._plan.certificate is not None:
            roles = self._roles()
            facts = self._cluster.wait([(r, r.actor.host_facts.remote()) for r in roles])
            hosts = {role.name: fact for role, fact in zip(roles, facts, strict=True)}
            check_live(self._plan.certificate, fingerprints, hosts)
        return fingerprints

    @property
    def _rollout_ranks(self) -> int:
        """Scheduler ranks of all engines."""
        return self._plan.layout.rollout_tp * self._plan.engine.num_engines

    def rollout_readbacks(self) -> list[dict[str, Any]]:
        """One report per scheduler rank, engine by engine."""
        return [rank for engine in self._on_engines("readback") for rank in engine["ranks"]]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[dict[str, Any]],
        request_ids: Sequence[str] | None = None,
    ) -> list[Generation]:
        """Sample one response a prompt, in the order of the prompts, whose parts the engines share;
        request_ids: names for the requests, or the engine's."""
        calls = [
            (
                role,
                role.actor.generate.remote(
                    prompts[part],
                    sampling[part],
                    None if request_ids is None else request_ids[part],
                ),
            )
            for role, part in self._parts(len(prompts))
        ]
        return [generation for found in self._cluster.wait(calls) for generation in found]

    def _parts(self, count: int) -> list[tuple[Role, slice]]:
        """Each engine with its consecutive part of `count` sequences; none where it has none."""
        size = -(-count // len(self._engines))
        parts = [slice(i * size, (i + 1) * size) for i in range(len(self._engines))]
        return [(r, p) for r, p in zip(self._engines, parts, strict=True) if p.start < count]

    def score(
        self,
        batch: Batch,
        temperature: float | None = None,
        sequences_per_micro_batch: int | None = None,
    ) -> list[Any]:
        """The trainer's fp32 logprobs of every response token, one array a sequence; temperature
        and micro-batch are the plan's unless given."""
        if temperature is None:
            temperature = self._plan.run.temperature
        scores: list[Any] = self._on_trainers(
            "score", batch, temperature, sequences_per_micro_batch
        )[0]
        return scores

    def gradients(self, batch: Batch, temperature: float, recompute: str) -> dict[str, Any]:
        """Norm and digests of the gradient of a batch; see `TrainerRank.gradients`. The digests are
        one a rank."""
        ranks = self._on_trainers("gradients", batch, temperature, recompute)
        return {"grad_norm": ranks[0]["grad_norm"], "digests": [rank["digest"] for rank in ranks]}

    def flush_cache(self) -> None:
        """Empty the engines' prefix caches."""
        self._on_engines("flush_cache")

    def rescore(self, batch: Batch, request_ids: Sequence[str]) -> list[Any]:
        """The engine's own logprobs of every response token, from a prefill of whole sequences."""
        calls = [
            (role, role.actor.rescore.remote(batch.part(part), request_ids[part]))
            for role, part in self._parts(len(batch))
        ]
        return [score for found in self._cluster.wait(calls) for score in found]

    def train(
        self, batch: Batch, advantages: Sequence[float], old_logprobs: Sequence[Any]
    ) -> dict[str, float]:
        """One optimizer step."""
        result: dict[str, float] = self._on_trainers(
            "train", batch, advantages, old_logprobs, self._plan.run.temperature
        )[0]
        return result

    def sync_weights(self) -> None:
        """Trainer weights into every engine, a bucket at a time, caches dropped."""
        sources = self._cluster.shared_gpus()
        read_from = list(dict.fromkeys(sources)) or [0]
        reading = [
            (read_from.index(source), sources[:rank].count(source))
            for rank, source in enumerate(sources)
        ]
        size = len(reading) // len(self._engines)
        count = self._on_trainers("begin_weight_sync")[0]
        for index in range(count):
            # What is sent goes from actor to actor; the head node never holds it.
            sent = [
                role.actor.call.remote(
                    "send_weights", index, sources.count(rank), len(set(sources))
                )
                for rank, role in enumerate(self._trainers)
            ]
            updates = [
                (
                    role,
                    role.actor.update_weights.remote(
                        index == count - 1,
                        reading[number * size : (number + 1) * size],
                        *(sent[source] for source in read_from),
                    ),
                )
                for number, role in enumerate(self._engines)
            ]
            waiting = list(zip(self._trainers, sent, strict=True))
            others = [pair for rank, pair in enumerate(waiting) if rank not in read_from]
            self._cluster.wait([*others, *updates])
        self._on_trainers("end_weight_sync")

    def digests(self) -> dict[str, str | None]:
        """Weights digests of both sides; `GateClosed` where they differ."""
        calls = [(role, role.actor.call.remote("weights_digest")) for role in self._trainers]
        engines = self._engines if self.patched else []
        calls += [(role, role.actor.weights_digest.remote()) for role in engines]
        digests = self._cluster.wait(calls)
        trainer = set(digests[: len(self._trainers)])
        mine = trainer.pop() if len(trainer) == 1 else None
        found = digests[len(self._trainers) :]
        for theirs in found:
            check_weights(theirs, mine)
        return {"rollout": found[0] if found else None, "trainer": mine}

    def start_rollout_taps(self, keep: str | None = None, fault: str | None = None) -> None:
        """Record the rows of every tap in the engines, from an empty prefix cache on; `keep` names
        rows to store whole, `fault` is injected meanwhile."""
        self._on_engines("start_taps", keep, fault)

    def start_trainer_taps(self, keep: str | None = None, fault: str | None = None) -> None:
        """The same in the trainer."""
        self._on_trainers("start_taps", keep, fault)

    def finish_rollout_taps(self, side: str = "rollout") -> list[RankRecord]:
        """Stop recording; the records of the engines' ranks."""
        engines = self._on_engines("finish_taps", self._plan.layout.rollout_tp)
        return [
            RankRecord.of(side, rank, dump) for dumps in engines for rank, dump in enumerate(dumps)
        ]

    def finish_trainer_taps(self) -> list[RankRecord]:
        """Stop recording; the records of the trainer's ranks."""
        dumps = self._on_trainers("finish_taps")
        return [RankRecord.of("trainer", dump["tp_rank"], dump["taps"]) for dump in dumps]

    def save_weights(self, folder: Path) -> None:
        """Write the trainer's weights alone as a Hugging Face folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self._on_trainers("save_hf", str(folder))

    def save(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder, and the optimizer beside them."""
        folder.mkdir(parents=True, exist_ok=True)
        self._cluster.wait([(r, r.actor.save.remote(str(folder))) for r in self._trainers])

    def restore_optimizer(self, folder: Path) -> None:
        """Read the optimizer that `save` wrote for the same layout."""
        self._cluster.wait(
            [(r, r.actor.restore_optimizer.remote(str(folder))) for r in self._trainers]
        )

    def peak_memory(self) -> dict[str, int]:
        """Peak resident bytes of each role's processes on this machine's accounting."""
        roles = self._roles()
        peaks = self._cluster.wait([(r, r.actor.peak_memory.remote()) for r in roles])
        return {role.name: peak for role, peak in zip(roles, peaks, strict=True)}

    def _on_engines(self, method: str, *args: Any) -> list[Any]:
        calls = [(role, getattr(role.actor, method).remote(*args)) for role in self._engines]
        return self._cluster.wait(calls)

    def _on_trainers(self, method: str, *args: Any) -> list[Any]:
        calls = [(role, role.actor.call.remote(method, *args)) for role in self._trainers]
        return self._cluster.wait(calls)


def _on_node(gpus: Sequence[tuple[str, str]], bundles: Sequence[int], bundle: int) -> Sequence[int]:
    """Those of the trainer's bundles whose GPUs are on `bundle`'s node: its ranks see each other's
    GPUs, so that they can map their memory. Without GPUs: itself."""
    if not gpus:
        return [bundle]
    return [other for other in bundles if gpus[other][0] == gpus[bundle][0]]


def _visible(gpus: Sequence[tuple[str, str]], bundles: Sequence[int]) -> dict[str, str]:
    if not gpus:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[bundle][1] for bundle in bundles)}
