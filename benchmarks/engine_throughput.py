"""Decode and prefill of whole engines: the contract, stock SGLang, its deterministic mode.

    PYTHONPATH=. python3 -m benchmarks.engine_throughput OUT.json [--model qwen3-4b] [--profile]

Each engine is a process of its own on the same GPU, with the launcher's own arguments: the same
attention backend, sampling in PyTorch, CUDA graphs, logprobs returned. All are started first and
then take turns, so that the clocks of the GPU are the same for all; figures are medians over the
rounds. A decode step is the difference of two calls that prefill alike. `--profile` adds a table of
kernels for decode at batch 16 and for a prefill. `--device cpu --model qwen3-tiny` runs the same
code without a GPU; its figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from miles_launcher.gpu_gate.machine import device_name, versions
from miles_launcher.plan import LaunchPlan
from miles_launcher.policy import CONTRACT_OFF
from miles_launcher.resolve import LaunchArgs, resolve
from miles_launcher.schema import DEFAULT_CONTRACT
from miles_launcher.seeded_weights import ensure_seeded_weights

VARIANTS = ("contract", "stock", "deterministic")
# (batch, prompt tokens, new tokens of the shorter and of the longer call), (batch, prompt tokens).
_DECODE = {"cuda": [(1, 128, 8, 136), (16, 128, 8, 136), (64, 128, 8, 136)], "cpu": [(2, 8, 2, 6)]}
_PREFILL = {"cuda": [(8, 2048), (1, 4096)], "cpu": [(2, 16)]}
_PROFILED = {
    "cuda": {"decode": (16, 8, 64), "prefill": (4, 2048, 1)},
    "cpu": {"decode": (2, 8, 4)},
}


def plan_of(variant: str, model: str, device: str, out: Path) -> tuple[LaunchPlan, dict[str, Any]]:
    """The launcher's plan of a variant, and its engine arguments."""
    overrides: tuple[str, ...] = ("rollout.chunked_prefill_size=8192",)
    if device == "cuda":
        overrides += ("rollout.mem_fraction_static=0.85", "rollout.max_total_tokens=32768")
    plan = resolve(
        LaunchArgs(
            model=model,
            device=device,
            contract=DEFAULT_CONTRACT if variant == "contract" else CONTRACT_OFF,
            out=out / variant,
            overrides=overrides,
        )
    )
    kwargs = {**plan.rollout.engine_kwargs, "model_path": plan.paths.model_path}
    # Several engines wait on one machine while one is timed.
    kwargs["sleep_on_idle"] = True
    if variant == "deterministic":
        kwargs["enable_deterministic_inference"] = True
    return plan, kwargs


class Remote:
    """A worker process; `call` waits for its answer."""

    def __init__(self, variant: str, model: str, device: str, folder: Path) -> None:
        self.variant = variant
        plan, kwargs = plan_of(variant, model, device, folder)
        spec = {
            "engine_kwargs": kwargs,
            "env": plan.rollout.env,
            "vocab_size": plan.model.vocab_size,
            "device": device,
        }
        path, self.log = folder / f"{variant}.json", folder / f"{variant}.log"
        path.write_text(json.dumps(spec))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine_worker", str(path), str(self.log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> Any:
        """The next answer; `RuntimeError` with the end of the log where the process is gone."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = self.log.read_text(errors="replace")[-1500:]
            raise RuntimeError(f"{self.variant}: the engine is gone\n{tail}")
        return json.loads(line).get("value")

    def call(self, name: str, **arguments: Any) -> Any:
        """What the worker's method returns."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        """Close its input, which ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def measure(
    engines: list[Remote], device: str, rounds: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows with every round, ratios of the medians), engines in turn within a round."""
    tasks: list[tuple[str, int, int, dict[str, int]]] = [
        ("decode", b, n, {"batch": b, "length": n, "few": few, "many": many})
        for b, n, few, many in _DECODE[device]
    ]
    tasks += [("prefill", b, n, {"batch": b, "length": n}) for b, n in _PREFILL[device]]
    rows, ratios = [], []
    for what, batch, length, arguments in tasks:
        seconds: dict[str, list[float]] = {engine.variant: [] for engine in engines}
        for number in range(rounds + 1):
            for engine in engines:
                value = engine.call(what, **arguments)
                # The first round compiles kernels and fills caches.
                if number:
                    seconds[engine.variant].append(value)
        tokens = batch if what == "decode" else batch * length
        medians = {variant: statistics.median(values) for variant, values in seconds.items()}
        for variant, values in seconds.items():
            rows.append(
                {
                    "what": what,
                    "batch": batch,
                    "prompt_tokens": length,
                    "variant": variant,
                    "ms": round(1e3 * medians[variant], 4),
                    "tokens_per_s": round(tokens / medians[variant], 1),
                    "rounds_ms": [round(1e3 * value, 4) for value in values],
                }
            )
        ratio = {
            f"over_{other}": round(medians[other] / medians["contract"], 4)
            for other in medians
            if other != "contract" and "contract" in medians
        }
        ratios.append({"what": what, "batch": batch, "prompt_tokens": length, **ratio})
        print(f"{what} {batch} x {length}: {medians} s; contract {ratio}", flush=True)
    return rows, ratios


def main(arguments: list[str] | None = None) -> int:
    """See the module. Exit code 1 where the contract's engine, or both others, did not run."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.engine_throughput")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="qwen3-4b")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {
        "benchmark": "engine_throughput",
        "model": options.model,
        "device": device_name(options.device),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rounds": options.rounds,
        "errors": {},
    }

    def write() -> None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan, _ = plan_of("contract", options.model, options.device, folder)
        ensure_seeded_weights(plan.model, plan.paths.weights_seed, Path(plan.paths.model_path))
        engines = [Remote(v, options.model, options.device, folder) for v in options.variants]
        try:
            for engine in list(engines):
                try:
                    engine.answer()
                except RuntimeError as error:
                    result["errors"][engine.variant] = str(error)
                    print(error, flush=True)
                    engines.remove(engine)
            print(f"running: {', '.join(e.variant for e in engines)}", flush=True)
            result["rows"], result["ratios"] = measure(engines, options.device, options.rounds)
            write()
            if options.profile:
                result["profile"] = {}
                for what, (batch, length, new) in _PROFILED[options.device].items():
                    result["profile"][what] = {
                        "batch": batch,
                        "prompt_tokens": length,
                        "new_tokens": new,
                        "variants": {
                            e.variant: e.call("profile", batch=batch, length=length, new_tokens=new)
                            for e in engines
                        },
                    }
                    write()
        except RuntimeError as error:
            result["errors"]["run"] = str(error)
            print(error, flush=True)
        finally:
            write()
            for engine in engines:
                engine.end()
    return 1 if result["errors"].keys() & {"contract", "run"} or len(engines) < 2 else 0


if __name__ == "__main__":
    sys.exit(main())
