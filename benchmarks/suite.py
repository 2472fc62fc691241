"""What `python3 -m benchmarks` runs: each benchmark, and the ops whose proof it needs first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from miles_launcher.conformance.certificate import Certificate
from miles_launcher.conformance.properties import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A module run as `python3 -m benchmarks.NAME OUT.json`.

    ops: as `miles conform` calls them; one that failed there is given no time. gpus: fewer refuse
    the benchmark. compiles: takes `--compile I N`, which fills Triton's cache in N processes.
    """

    name: str
    ops: tuple[str, ...]
    gpus: int = 1
    compiles: bool = False

    @property
    def module(self) -> str:
        return f"benchmarks.{self.name}"


BENCHMARKS: Final = (
    Benchmark(name="row_linear", ops=("row_linear_v2",), compiles=True),
    Benchmark(name="row_linear_v1", ops=("row_linear_v1",), compiles=True),
    Benchmark(name="linear", ops=("linear",), compiles=True),
    Benchmark(name="collectives", ops=("tree_all_reduce",), gpus=2),
    Benchmark(name="attention", ops=("attention",), compiles=True),
    Benchmark(name="logprobs", ops=("log_softmax", "linear"), compiles=True),
    Benchmark(name="elementwise", ops=("rms_norm", "qk_norm_rope", "silu_mul"), compiles=True),
)


def select(names: Sequence[str]) -> tuple[Benchmark, ...]:
    """The benchmarks of these names, all where none is given; `ValueError` for an unknown one."""
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown benchmark {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(known[name] for name in known if not names or name in names)


def refusal(benchmark: Benchmark, certificate: Certificate, gpus: int) -> str | None:
    """Why a benchmark may not report speed on this machine, or None.

    A red property, an op that was not run, or one of which nothing was compared all refuse; "not
    shown" (more GPUs needed) does not.
    """
    if gpus < benchmark.gpus:
        return f"needs {benchmark.gpus} GPUs, {gpus} here"
    for op in benchmark.ops:
        cells = certificate.results.get(op)
        if not cells:
            return f"{op} was not run by the conformance suite"
        red = [name for name, cell in cells.items() if cell.status == Status.FAILED]
        if red:
            return f"{op} failed {', '.join(red)}"
        if sum(cell.compared for cell in cells.values()) == 0:
            return f"{op}: the conformance suite compared nothing"
    return None
