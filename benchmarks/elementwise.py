"""Norms, rotation and activation against a copy of the same bytes and stock SGLang's own path.

    PYTHONPATH=. python3 -m benchmarks.elementwise out.json

The stock path is what SGLang runs under `rl_on_policy_target`: PyTorch operations one after the
other (`elementwise_native`). The bits of the first rows are compared with the CPU reference's
first, and a backward pass over as many rows with the reference's gradient and with itself; what is
wrong there is given no time, and the exit code is 1 (2 without a GPU). `--compile I N` only fills
Triton's cache with every N-th case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from benchmarks import elementwise_native as native
from benchmarks.graph_timing import launches, medians
from benchmarks.product_timing import _environment
from megatron_patch import autograd
from megatron_patch.autograd import HeadLayout
from miles_launcher.conformance.bits import differing
from sglang_patch import ops

BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-6
DIM = 128
# Model: hidden, query heads, key heads, intermediate.
MODELS = {
    "0.6B": (1024, 16, 8, 3072),
    "4B": (2560, 32, 8, 9728),
    "8B": (4096, 32, 8, 12288),
}
ROWS = (1, 16, 64, 256, 2048, 8192, 32768)
# Of the other models.
FEWER_ROWS = (1, 64, 2048, 32768)
FULL_MODEL = "4B"
# Fewer rows are decoded only, and have no backward pass.
TRAINED_ROWS = 2048
OPS = ("add_rms_norm", "qk_norm_rope", "silu_mul")
COPY_TARGET, NATIVE_TARGET = 0.85, 2.0
# Beyond the L2 cache; inputs of few rows are in the cache in an engine too.
_BEYOND_CACHE, _CACHED_ROWS = 200e6, 256
_CHECKED_ROWS = 64
_WORST_GRADIENT = 2.0**-7

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One op of one model over a number of tokens, forward or backward."""

    op: str
    model: str
    rows: int
    backward: bool

    @property
    def bytes(self) -> int:
        """What must be read and written: every input and every result once."""
        hidden, heads, kv_heads, inner = MODELS[self.model]
        head_bytes = 2 * DIM
        width = {
            # x bf16, residual fp32 -> out bf16, stream fp32; back: stream fp32, the gradients of
            # out bf16 and stream fp32 -> of x bf16 and residual fp32.
            "add_rms_norm": (12 * hidden, 16 * hidden),
            # Back: query and key, three gradients -> one of the fused projection.
            "qk_norm_rope": (
                2 * (heads + kv_heads) * head_bytes,
                (3 * heads + 5 * kv_heads) * head_bytes,
            ),
            "silu_mul": (6 * inner, 10 * inner),
        }[self.op]
        return self.rows * width[self.backward]


def cases() -> list[Case]:
    """All, the small ones first."""
    return [
        Case(op, model, rows, backward)
        for rows in ROWS
        for op in OPS
        for model in MODELS
        for backward in (False, True)
        if (model == FULL_MODEL or rows in FEWER_ROWS) and (not backward or rows >= TRAINED_ROWS)
    ]


def _heads(case: Case) -> tuple[int, int, HeadLayout]:
    _, heads, kv_heads, _ = MODELS[case.model]
    groups = heads // kv_heads
    layout = HeadLayout(groups=kv_heads, per_group=groups, dim=DIM, first=0, owned=groups)
    return heads, kv_heads, layout


def inputs(case: Case, rows: int, device: str) -> tuple[Tensors, Tensors]:
    """Random arguments of the op, then the gradients of its results."""
    generator = torch.Generator(device).manual_seed(rows)

    def random(*size: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    hidden, heads, kv_heads, inner = MODELS[case.model]
    if case.op == "add_rms_norm":
        x, residual = random(rows, hidden), random(rows, hidden, dtype=FP32)
        return (x, residual, 1 + random(hidden) / 4), (
            random(rows, hidden),
            random(rows, hidden, dtype=FP32),
        )
    if case.op == "silu_mul":
        return (random(rows, 2 * inner),), (random(rows, inner),)
    mixed = random(rows, (heads + 2 * kv_heads) * DIM)
    weights = [1 + random(DIM) / 4 for _ in range(2)]
    gradients = tuple(random(rows, n, DIM) for n in (heads, kv_heads, kv_heads))
    positions = torch.arange(rows, device=device) * 7 % _POSITIONS
    return (mixed, *weights, positions, _table(device)), gradients


_POSITIONS = 40960
_TABLES: dict[str, torch.Tensor] = {}


def _table(device: str) -> torch.Tensor:
    if device not in _TABLES:
        _TABLES[device] = ops.rope_table(DIM, _POSITIONS, 1e6).to(device)
    return _TABLES[device]


def forward(case: Case, arguments: Tensors) -> Tensors:
    """As the engine calls the op."""
    if case.op == "add_rms_norm":
        x, residual, weight = arguments
        return ops.rms_norm(x, weight, EPS, residual=residual)
    if case.op == "silu_mul":
        return (ops.silu_mul(*arguments),)
    mixed, query_weight, key_weight, positions, table = arguments
    heads, kv_heads, _ = _heads(case)
    query, key, _ = mixed.view(mixed.shape[0], -1, DIM).split([heads, kv_heads, kv_heads], dim=1)
    return ops.qk_norm_rope(query, key, query_weight, key_weight, EPS, positions, table)


def trained(case: Case, arguments: Tensors) -> Tensors:
    """As the trainer calls it."""
    if case.op == "add_rms_norm":
        return autograd.add_rms_norm(*arguments, EPS)
    if case.op == "silu_mul":
        return (autograd.silu_mul(*arguments),)
    mixed, query_weight, key_weight, positions, table = arguments
    return autograd.qk_norm_rope(
        mixed, query_weight, key_weight, EPS, positions, table, _heads(case)[2]
    )


def stock(case: Case, arguments: Tensors) -> Tensors:
    """As stock SGLang computes it; of the trainer's layout where it is differentiated."""
    if case.op == "add_rms_norm":
        return native.add_rms_norm(*arguments, EPS)
    if case.op == "silu_mul":
        return (native.silu_mul(*arguments),)
    mixed, query_weight, key_weight, positions, table = arguments
    heads, kv_heads, layout = _heads(case)
    if case.backward:
        query, key, value = layout.split(mixed)
        query = query.reshape(mixed.shape[0], -1, DIM)
    else:
        shaped = mixed.view(mixed.shape[0], -1, DIM)
        query, key, value = shaped.split([heads, kv_heads, kv_heads], dim=1)
    out = native.qk_norm_rope(query, key, query_weight, key_weight, EPS, positions, table)
    return (*out, value) if case.backward else out


def _leaves(arguments: Tensors, *, stock: bool = False, training: bool = False) -> Tensors:
    """Copies with gradients. Stock weights are fp32; in training the weights' gradients go to
    megatron's fp32 buffers."""
    leaves = []
    for t in arguments:
        if not t.is_floating_point() or t.shape[0] == _POSITIONS:
            leaves.append(t)
            continue
        weight = t.dim() == 1
        leaves.append(t.detach().to(FP32 if stock and weight else t.dtype).requires_grad_())
        if training and weight:
            leaves[-1].main_grad = torch.zeros_like(t, dtype=FP32)  # type: ignore[attr-defined]
    return tuple(leaves)


def gradients(
    call: Callable[[Case, Tensors], Tensors], case: Case, leaves: Tensors, given: Tensors
) -> Callable[[], Tensors]:
    """A call that runs the backward pass alone; the forward pass runs here."""
    results = call(case, leaves)
    wanted = [t for t in leaves if t.requires_grad]
    pairs = [(r, g.to(r.dtype)) for r, g in zip(results, given, strict=True)]
    return lambda: torch.autograd.grad(
        [r for r, _ in pairs],
        wanted,
        [g for _, g in pairs],
        retain_graph=True,
        allow_unused=True,
    )


def _by_row(t: torch.Tensor) -> bool:
    """Activations and positions; not weights, nor the table."""
    return t.shape[0] != _POSITIONS and (t.dim() > 1 or not t.is_floating_point())


def check(case: Case) -> dict[str, Any]:
    """`differing`: elements with other bits than the CPU reference's (forward), or than those of a
    second pass (backward); `gradient_error`: relative to the reference's, in norm, the worst."""
    rows = min(case.rows, _CHECKED_ROWS)
    if not case.backward:
        # As many rows as are timed, for the same kernel; a row does not depend on the others.
        there, _ = inputs(case, case.rows, "cuda")
        first = tuple((t[:rows] if _by_row(t) else t).cpu() for t in there)
        pairs = zip(forward(case, there), forward(case, first), strict=True)
        return {"differing": sum(differing(a[:rows].cpu(), b) for a, b in pairs)}
    arguments, given = inputs(case, rows, "cpu")
    there = tuple(t.cuda() for t in arguments)
    wanted = gradients(trained, case, _leaves(arguments), given)()
    given = tuple(g.cuda() for g in given)
    runs = [gradients(trained, case, _leaves(there), given)() for _ in range(2)]
    errors = [
        float((a.double().cpu() - b.double()).norm() / b.double().norm())
        for a, b in zip(runs[0], wanted, strict=True)
    ]
    different = sum(differing(a.cpu(), b.cpu()) for a, b in zip(*runs, strict=True))
    return {"differing": different, "gradient_error": max(errors)}


def _in_turn(call: Callable[[Any], Any], arguments: Sequence[Any]) -> Callable[[], Any]:
    turn = cycle(arguments)
    return lambda: call(next(turn))


def _calls(case: Case) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ours, the stock path, and a copy, over inputs that the cache does not hold."""
    sets = 1
    if case.rows > _CACHED_ROWS:
        sets = max(1, min(4, int(_BEYOND_CACHE // case.bytes) + 1))
    given = [inputs(case, case.rows, "cuda") for _ in range(sets)]
    if case.backward:
        for name, call in (("ours", trained), ("stock", stock)):
            passes = [
                gradients(call, case, _leaves(a, stock=name == "stock", training=name == "ours"), g)
                for a, g in given
            ]
            yield name, _in_turn(lambda backward: backward(), passes)
    else:
        arguments = [a for a, _ in given]
        widened = [
            tuple(t.float() if t.dim() == 1 and t.is_floating_point() else t for t in a)
            for a in arguments
        ]
        for name, call, of in (("ours", forward, arguments), ("stock", stock, widened)):
            yield name, _in_turn(partial(call, case), of)
    half = [torch.randint(256, (case.bytes // 2,), device="cuda", dtype=torch.uint8)]
    half += [half[0].clone() for _ in range(sets - 1)]
    into = torch.empty_like(half[0])
    yield "copy", _in_turn(into.copy_, half)


def measure(case: Case, stream: torch.cuda.Stream) -> dict[str, Any]:
    """One row of the report; no time where the check failed."""
    checked = check(case)
    row: dict[str, Any] = {
        "op": case.op,
        "model": case.model,
        "rows": case.rows,
        "pass": "backward" if case.backward else "forward",
        "bytes": case.bytes,
        **checked,
    }
    if checked["differing"] or checked.get("gradient_error", 0.0) > _WORST_GRADIENT:
        return {**row, "wrong": True}
    with torch.cuda.stream(stream):
        calls = dict(_calls(case))
        if case.model == FULL_MODEL and case.rows == (TRAINED_ROWS if case.backward else 64):
            for name in ("ours", "stock"):
                row[f"{name}_launches"] = launches(calls[name])
    times = medians(calls, stream)
    row |= {f"{name}_us": value for name, value in times.items()}
    row["of_copy_bandwidth"] = round(times["copy"] / times["ours"], 3)
    row["stock_over_ours"] = round(times["stock"] / times["ours"], 2)
    return row


def _line(row: dict[str, Any]) -> str:
    name = f"{row['op']:13} {row['pass']:8} {row['model']:5} rows {row['rows']:5}"
    if row.get("wrong"):
        return f"{name}: wrong, no time: {row}"
    return (
        f"{name}: {row['ours_us']:9.2f} us, {row['of_copy_bandwidth']:.2f} of a copy's bandwidth, "
        f"stock {row['stock_over_ours']:.1f}x"
    )


def main(arguments: list[str]) -> int:
    """See the module."""
    if not torch.cuda.is_available():
        print("no GPU here", file=sys.stderr)
        return 2
    if arguments[:1] == ["--compile"]:
        for case in cases()[int(arguments[1]) :: int(arguments[2])]:
            check(case)
            # The stock rotation is compiled too.
            given, back = inputs(case, min(case.rows, _CHECKED_ROWS), "cuda")
            if case.backward:
                gradients(stock, case, _leaves(given, stock=True), back)()
            else:
                stock(case, given)
        return 0
    path, rows = Path(arguments[0]), []
    stream = torch.cuda.Stream()
    for case in cases():
        rows.append(measure(case, stream))
        print(_line(rows[-1]), flush=True)
        path.write_text(json.dumps({**_environment(), "rows": rows}, indent=1) + "\n")
    return 1 if any(row.get("wrong") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
