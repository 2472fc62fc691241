"""`make gpu-gate`: every configuration that fits the GPUs here, to exact zero, with controls.

    python -m miles_launcher.gpu_gate [--model qwen3-4b] [--out DIR] [--seconds N] [--only NAME ...]
    python -m miles_launcher.gpu_gate --collect --out DIR

Writes DIR/<configuration>.json after each group of batches and DIR/gate.json over all (by default
into docs/results/<gpu>/<date>). Run again with the same DIR it goes on where it was: what was whole
and is of the same text, releases and machine is kept. Exit codes: 0 all exact and every control
different; 1 as far as it came, but something did not run in time; 2 not run: wrong arguments, or no
GPU; 3 the gate is closed; 4 a process died; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from ..devices import visible_gpus
from .configurations import ALL, select
from .machine import device_name
from .results import INDEX_FILE
from .run import EXACT, INTERRUPTED, NOT_RUN, Gate, GateOptions, table
from .sizes import FULL, SMALL


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m miles_launcher.gpu_gate",
        description="Rollout and trainer, bit for bit, in every configuration that fits.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", help="default: qwen3-4b; on a CPU qwen3-tiny")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gpus", type=int, help="as if there were so many; on a CPU 1")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="in this order")
    parser.add_argument("--groups", nargs="+", default=[], metavar="NAME", help="only these")
    parser.add_argument("--out", type=Path, help="where the results go, and come from")
    parser.add_argument(
        "--scratch",
        type=Path,
        help="where the runs' plans and logs go and stay; without it a temporary folder, which "
        "is removed after a green run",
    )
    parser.add_argument("--seconds", type=float, help="the whole budget; no start without time")
    parser.add_argument("--min-tokens", type=int, help="that a group compares; at least 1")
    parser.add_argument(
        "--collect", action="store_true", help="write the index of the results in --out and stop"
    )
    parser.add_argument("--list", action="store_true", help="show the configurations and stop")
    return parser


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    options = _parser().parse_args(arguments)
    if options.list:
        for c in ALL:
            print(f"{c.name}: {c.gpus} GPUs, {c.contract}, {', '.join(c.groups)}")
        return 0
    cpu = options.device == "cpu"
    gpus = 0 if cpu else visible_gpus()
    if not cpu and not gpus and not options.collect:
        print(
            "not run: no GPU is visible here; on a GPU host this runs what fits, and with "
            "--device cpu the same code over a tiny model",
            file=sys.stderr,
        )
        return NOT_RUN
    wanted = options.gpus if options.gpus is not None else (1 if cpu else gpus)
    sizes = SMALL if cpu else FULL
    minimum = sizes.min_tokens if options.min_tokens is None else options.min_tokens
    try:
        if minimum < 1:
            raise ValueError(f"--min-tokens {minimum}: zero tokens show nothing; at least 1")
        if options.collect:
            wanted = 8
        elif not cpu and wanted > gpus:
            raise ValueError(f"--gpus {wanted}: {gpus} visible here")
        chosen = select(wanted, options.only, options.groups, cpu=cpu)
        gate_options = GateOptions(
            model=options.model or ("qwen3-tiny" if cpu else "qwen3-4b"),
            device="cpu" if cpu else "cuda",
            gpus=gpus,
            out=(options.out or _default_out(options.device)).absolute(),
            scratch=(options.scratch or Path(tempfile.mkdtemp(prefix="gpu-gate-"))).absolute(),
            min_tokens=minimum,
            seconds=options.seconds,
            small=cpu,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_RUN
    # `timeout` and a scheduler's end are as Ctrl-C: processes ended, the index written.
    signal.signal(signal.SIGTERM, _interrupt)
    gate = Gate(gate_options, chosen, say=lambda text: print(text, flush=True))
    code = INTERRUPTED
    try:
        if options.collect:
            code = gate.collect()
        else:
            print(f"{gate_options.model}: {len(chosen)} configurations, into {gate_options.out}")
            code = gate.run()
    except KeyboardInterrupt:
        return INTERRUPTED
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        code = NOT_RUN
        return code
    finally:
        if options.scratch is None and (options.collect or code in (EXACT, NOT_RUN)):
            shutil.rmtree(gate_options.scratch)
        else:
            print(f"plans and logs of the runs: {gate_options.scratch}", flush=True)
    index = json.loads((gate_options.out / INDEX_FILE).read_text(encoding="utf-8"))
    print(table(index["configurations"]))
    for check in index["checks"]:
        print(f"{'same' if check['ok'] else 'NOT THE SAME'}: {check['name']}")
    for reason in [*index["closed_by"], *index["died"]]:
        print(f"closed: {reason}"[:2000])
    for entry in index["not_run"]:
        print(f"not run: {entry['name']}: {entry['reason']}")
    print(f"exit code {code}, {index['seconds']} s; {gate_options.out / INDEX_FILE}")
    return code


def _default_out(device: str) -> Path:
    return Path("docs") / "results" / device_name(device) / time.strftime("%Y-%m-%d")


if __name__ == "__main__":
    sys.exit(main())
