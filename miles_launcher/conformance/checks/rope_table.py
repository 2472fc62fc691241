"""`rope_table`, made once on the CPU: one fp32 frequency a column, angles rounded once."""

from __future__ import annotations

import numpy as np
import torch

from ..context import Context, array
from .common import OpSuite, repeated

BASE, POSITIONS = 1e6, 40960


def table_of(ctx: Context, head_dim: int) -> torch.Tensor:
    """The op's table of one head size."""
    out: torch.Tensor = ctx.subject.rope_table(head_dim, POSITIONS, BASE)
    return out


def order(ctx: Context) -> str:
    """Every column follows from one fp32 frequency within two ulps of the true one: fp32 angle,
    its cosine and sine rounded once."""
    sample = np.unique(np.concatenate((np.arange(40), np.arange(4090, 4100), [8191, 40000, 40959])))
    for head_dim in ctx.setting.head_dims:
        table = array(table_of(ctx, head_dim))
        half = head_dim // 2
        for i in range(half):
            true = float(np.longdouble(BASE) ** (-np.longdouble(2 * i) / head_dim))
            candidates = [np.float32(true)]
            for direction in (np.float32(0), np.float32(2)):
                step = np.float32(true)
                for _ in range(2):
                    step = np.nextafter(step, direction)
                    candidates.append(step)
            wanted = np.stack((table[sample, i], table[sample, half + i])).view(np.int32)
            fits = [f for f in candidates if np.array_equal(_column(f, sample), wanted)]
            ctx.require(len(fits) == 1, f"head_dim {head_dim}, column {i}: {len(fits)} frequencies")
            ctx.compared += wanted.size
    return f"head_dim {ctx.setting.head_dims}: each column is one fp32 frequency's, bit for bit"


def _column(frequency: np.float32, positions: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    angle = (positions.astype(np.float32) * frequency).astype(np.float64)
    return np.stack((np.cos(angle), np.sin(angle))).astype(np.float32).view(np.int32)


def value(ctx: Context) -> str:
    worst = 0.0
    for head_dim in ctx.setting.head_dims:
        half = head_dim // 2
        frequency = BASE ** -(torch.arange(half, dtype=torch.float64) * 2 / head_dim)
        angle = torch.arange(POSITIONS, dtype=torch.float64)[:, None] * frequency
        exact = torch.cat((angle.cos(), angle.sin()), 1)
        # The frequency within two ulps, the angle rounded once: 2.5 units of the angle.
        bound = torch.cat((angle, angle), 1) * 2.5 * 2.0**-23 + 2.0**-24
        worst = max(worst, ctx.near(table_of(ctx, head_dim), exact, bound, f"head_dim {head_dim}"))
    return f"at most {worst:.2f} of 2.5 ulp of the angle, positions up to {POSITIONS - 1}"


def shapes(ctx: Context) -> str:
    for head_dim in ctx.setting.head_dims:
        table = table_of(ctx, head_dim)
        ctx.require(table.shape == (POSITIONS, head_dim), f"shape {tuple(table.shape)}")
        for rows in (1, 63, 64, 65, 4097):
            short = ctx.subject.rope_table(head_dim, rows, BASE)
            ctx.equal(short, table[:rows], f"head_dim {head_dim}: the first {rows} positions")
    ctx.refused(lambda: ctx.subject.rope_table(7, 8, BASE), "an odd head_dim")
    return "a shorter table is the beginning of a longer one"


def dtypes(ctx: Context) -> str:
    """fp32 on the CPU, whatever the defaults of the process that makes it."""
    before = torch.get_default_dtype()
    expected = table_of(ctx, 64)
    ctx.require(
        expected.dtype == torch.float32 and expected.device.type == "cpu", f"{expected.dtype}"
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(ctx.device):
            again = table_of(ctx, 64)
    finally:
        torch.set_default_dtype(before)
    ctx.equal(again, expected, "with bf16 as the default format")
    return "fp32 on the CPU, also under a bf16 default and another default device"


def run_to_run(ctx: Context) -> str:
    repeated(ctx, lambda: table_of(ctx, 128), "rope_table")
    return "four tables"


_ONE_TABLE = "one table on the CPU, for every rank and row"
SUITE = OpSuite(
    name="rope_table",
    checks={
        "order": order,
        "value": value,
        "dtypes": dtypes,
        "shapes": shapes,
        "run_to_run": run_to_run,
    },
    absent={
        **dict.fromkeys(("neighbours", "phases", "tp_shards", "tp_ranks"), _ONE_TABLE),
        **dict.fromkeys(("split_k", "kernel_table", "cpu_bits"), "made on the CPU, no kernel"),
    },
    fault=(("rope_table", "order"),),
)
