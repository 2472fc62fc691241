"""The rollout engine in a Ray actor: stock `sglang.Engine` with the plan's arguments."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..devices import host_facts
from ..parity.gate import GateClosed
from .batch import Batch
from .dumps import read_dump
from .logs import redirect_output

if TYPE_CHECKING:
    from .weight_sync import SentBucket

READBACK_KEY = "true_on_policy"
DIGEST_RPC = "true_on_policy_update_weights_digest"
START_TAPS_RPC = "true_on_policy_start_taps"
SAVE_TAPS_RPC = "true_on_policy_save_taps"
# A request with this before its sequence number is one whose rows taps record.
TAP_REQUEST = "true-on-policy-tap-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One sampled response: ids, and each one's logprob as the engine returned it (fp32);
    `cached_tokens` of its prompt were found in the prefix cache."""

    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    cached_tokens: int = 0


class RolloutEngine:
    """Runs inside the actor's process. The environment is set before SGLang is imported."""

    def __init__(self, env: Mapping[str, str], log_path: str) -> None:
        redirect_output(log_path)
        os.environ.update(env)
        self._engine: Any = None

    def pid(self) -> int:
        """This process."""
        return os.getpid()

    def start(self, engine_kwargs: dict[str, Any]) -> list[int]:
        """Start the engine; returns the process ids of its children."""
        import sglang
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs

        from ..render import OWN_ENGINE_FIELDS, check_engine_arguments

        check_engine_arguments(engine_kwargs)
        # SGLang logs a plugin that raises and serves without it; its fields are then missing.
        load_plugins()
        fields = {field.name for field in dataclasses.fields(ServerArgs)}
        if not fields >= OWN_ENGINE_FIELDS & engine_kwargs.keys():
            raise GateClosed(
                "the SGLang plugin did not load, so the engine would serve stock kernels; the "
                "reason stands in the rollout's log, and `miles doctor` checks every hook target"
            )
        self._engine = sglang.Engine(**engine_kwargs)
        return [int(pid) for pid in self._engine.get_all_child_pids()]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Mapping[str, Any]],
        request_ids: Sequence[str] | None = None,
    ) -> list[Generation]:
        """Sample one response a prompt; logprobs come from decode itself. request_ids: names for
        the requests, new ones in every call (None: the engine's own)."""
        outputs = self._engine.generate(
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params=[dict(parameters) for parameters in sampling],
            return_logprob=True,
            rid=None if request_ids is None else list(request_ids),
        )
        generations = []
        for output in outputs:
            pairs = output["meta_info"]["output_token_logprobs"]
            generations.append(
                Generation(
                    response_ids=tuple(int(pair[1]) for pair in pairs),
                    logprobs=tuple(float(pair[0]) for pair in pairs),
                    finish_reason=str((output["meta_info"]["finish_reason"] or {}).get("type")),
                    cached_tokens=int(output["meta_info"].get("cached_tokens", 0)),
                )
            )
        return generations

    def readback(self) -> dict[str, Any]:
        """`ranks`: one report per scheduler rank (none where the plugin is not live);
        `arguments`: the engine's resolved arguments."""
        info = self._engine.get_server_info()
        state = info["internal_states"][0]
        return {
            "ranks": state.get(READBACK_KEY, []),
            "arguments": {key: value for key, value in info.items() if _plain(value)},
        }

    def host_facts(self) -> dict[str, str | None]:
        """This machine's driver, GPU capability and kernel package."""
        return host_facts()

    def weights_digest(self) -> str | None:
        """Digest of the live weights over all ranks."""
        self._engine.collective_rpc(DIGEST_RPC)
        digests = {rank["weights_digest"] for rank in self.readback()["ranks"]}
        if len(digests) != 1:
            raise RuntimeError(f"rollout ranks report different weights digests: {digests}")
        return digests.pop()

    def rescore(self, batch: Batch, request_ids: Sequence[str]) -> list[np.ndarray]:
        """Logprobs of every response token as a prefill of the whole sequences gives them, at
        temperature 1: one fp32 array a sequence."""
        outputs = self._engine.generate(
            input_ids=[list(tokens) for tokens in batch.tokens],
            sampling_params=[{"max_new_tokens": 1, "temperature": 1.0, "sampling_seed": 0}]
            * len(batch),
            return_logprob=True,
            logprob_start_len=[length - 1 for length in batch.prompt_lengths],
            rid=list(request_ids),
        )
        scores = []
        for output, length in zip(outputs, batch.response_lengths, strict=True):
            pairs = output["meta_info"]["input_token_logprobs"]
            scores.append(np.asarray([p[0] for p in pairs[len(pairs) - length :]], np.float32))
        return scores

    def flush_cache(self) -> None:
        """Empty the prefix cache."""
        flush_cache(self._engine)

    def start_taps(self, keep: str | None = None, fault: str | None = None) -> None:
        """Record the rows of every tap in every rank, from an empty prefix cache on; `fault` is
        injected until they are finished."""
        flush_cache(self._engine)
        given = {"keep": keep, "fault": fault}
        self._engine.collective_rpc(
            START_TAPS_RPC, **{name: text for name, text in given.items() if text is not None}
        )

    def finish_taps(self, tp_size: int) -> list[dict[str, Any]]:
        """Stop recording; the dump of every rank (`sglang_patch.ops.taps.TapLog.dump`)."""
        with tempfile.TemporaryDirectory() as folder:
            self._engine.collective_rpc(SAVE_TAPS_RPC, folder=folder)
            return [read_dump(Path(folder) / f"rank-{rank}.pt") for rank in range(tp_size)]

    def update_weights(
        self, last: bool, reading: Sequence[tuple[int, int]], *sent: SentBucket
    ) -> None:
        """Load a bucket of new weights by the engine's own interface; after the `last` one every
        cached key and value is dropped.

        sent: what the trainer ranks that are read from handed over. reading: for each of the
        engine's ranks, which of them it reads and by which of its handles; empty where the one
        that was sent holds the bytes.
        """
        from .weight_sync import in_shared_memory, payload

        bucket, ranks = sent[0].bucket, self._engine.server_args.tp_size
        if reading:
            assert len(reading) == ranks, (reading, ranks)
            payloads = [payload(bucket, sent[i].handles[handle]) for i, handle in reading]
        else:
            assert sent[0].data is not None
            shared = in_shared_memory(sent[0].data)
            payloads = [payload(bucket, shared) for _ in range(ranks)]
        result = self._engine.update_weights_from_tensor(
            payloads, load_format="flattened_bucket", flush_cache=last
        )
        success, message = result if isinstance(result, tuple) else (result, "")
        if not success:
            raise RuntimeError(f"the engine refused the new weights: {message}")

    def peak_memory(self) -> int:
        """Peak resident bytes of this process and its children."""
        from .memory import peak_bytes

        return peak_bytes([os.getpid(), *self._engine.get_all_child_pids()])

    def shutdown(self) -> None:
        """End the engine's processes."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


def flush_cache(engine: Any, patience: float = 60.0) -> None:
    """Empty the prefix cache. The engine refuses while a request is still running, and it may run
    one step ahead of what it has returned, so it is asked until it agrees.

    Raises `RuntimeError` with its answer where it does not within `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        result = engine.flush_cache()
        if result.success:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the engine did not empty its cache in {patience:.0f} s: {result.message}"
            )
        time.sleep(0.02)


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
