"""`digest`: weights and token rows, one number each however they were cut."""

from __future__ import annotations

import numpy as np
import torch

from ..bits import one_ulp, random
from ..context import Context
from .common import OpSuite, repeated

BF16, FP32 = torch.bfloat16, torch.float32
_WORD = (1 << 64) - 1
# splitmix64 (Steele, Lea & Flood, 2014).
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_1) & _WORD
    z = ((z ^ (z >> 27)) * _MIX_2) & _WORD
    return z ^ (z >> 31)


def _element(value: int, place: int) -> int:
    return _mix((_mix((place * _GOLDEN) & _WORD) + value) & _WORD)


def _integers(x: torch.Tensor) -> list[list[int]]:
    """The bits of a matrix as signed numbers."""
    kind = torch.int16 if x.element_size() == 2 else torch.int32
    rows: list[list[int]] = x.cpu().contiguous().view(kind).tolist()
    return rows


def _matrix_digest(x: torch.Tensor) -> int:
    """The whole matrix, in Python's whole numbers."""
    return (
        sum(
            _element(value, (row << 31) + column)
            for row, values in enumerate(_integers(x))
            for column, value in enumerate(values)
        )
        & _WORD
    )


def _row_digests(x: torch.Tensor, columns: list[int]) -> torch.Tensor:
    sums = [
        sum(_element(v, c) for v, c in zip(values, columns, strict=True) if c >= 0) & _WORD
        for values in _integers(x)
    ]
    return torch.from_numpy(np.array(sums, dtype=np.uint64).view(np.int64).copy())


def _whole(ctx: Context, x: torch.Tensor) -> int:
    (there,) = ctx.put(x)
    ctx.compared += x.numel()
    out: int = ctx.subject.shard_digest(there, (0, x.shape[0]), (0, x.shape[1]))
    return out


def order(ctx: Context) -> str:
    for dtype in (BF16, FP32):
        x = random(9, 40, seed=111, dtype=dtype)
        ctx.require(_whole(ctx, x) == _matrix_digest(x), f"{dtype}: a matrix's digest")
        columns = torch.randperm(40, generator=torch.Generator().manual_seed(1)) - 1
        found = ctx.subject.row_digests(*ctx.put(x, columns))
        ctx.equal(found, _row_digests(x, columns.tolist()), f"{dtype}: row digests")
        seen = {
            _whole(ctx, x),
            _whole(ctx, x.flip(0)),
            _whole(ctx, x.flip(1)),
            _whole(ctx, one_ulp(x)),
        }
        ctx.require(len(seen) == 4, f"{dtype}: moved rows, moved columns or one ulp do not show")
    return "bf16 and fp32 against whole-number arithmetic; moves and one ulp show"


def dtypes(ctx: Context) -> str:
    (x,) = ctx.put(random(3, 4, seed=112))
    ctx.refused(lambda: ctx.subject.shard_digest(x.double(), (0, 3), (0, 4)), "fp64")
    ctx.refused(lambda: ctx.subject.shard_digest(x, (0, 2), (0, 4)), "a range of another size")
    columns = torch.arange(3, device=x.device)
    ctx.refused(lambda: ctx.subject.row_digests(x, columns), "three columns for four elements")
    ctx.require(_whole(ctx, x.cpu().half()) == _matrix_digest(x.cpu().half()), "fp16")
    return "16- and 32-bit formats; fp64 and ranges that do not fit refused"


def shapes(ctx: Context) -> str:
    for rows in ctx.setting.rows:
        x = random(rows, 3, seed=113)
        ctx.require(_whole(ctx, x) == _matrix_digest(x), f"{rows} rows")
        vector = x[:, 0].contiguous()
        (there,) = ctx.put(vector)
        found = ctx.subject.shard_digest(there, (0, rows), (0, 1))
        ctx.require(found == _matrix_digest(vector[:, None]), f"a vector of {rows}")
    ctx.require(_whole(ctx, x.t().contiguous().t()) == _matrix_digest(x), "strides")
    return f"rows {ctx.setting.rows}, vectors, strides"


def beside(ctx: Context) -> str:
    x = random(max(ctx.setting.rows), 33, seed=114)
    columns = torch.arange(33)
    found = ctx.subject.row_digests(*ctx.put(x, columns))
    for row in (0, len(x) // 2, len(x) - 1):
        alone = ctx.subject.row_digests(*ctx.put(x[row : row + 1], columns))
        ctx.equal(alone, found[row : row + 1], f"row {row} alone")
    return "row digests alone and in a batch"


def tp_shards(ctx: Context) -> str:
    x = random(16, 48, seed=115)
    expected = _matrix_digest(x)
    rows = _row_digests(x, list(range(48)))
    for tp in ctx.setting.tp:
        height, width = 16 // tp, 48 // tp
        by_rows = by_columns = 0
        partial = torch.zeros(16, dtype=torch.int64)
        for rank in range(tp):
            down, across = rank * height, rank * width
            (upper, left) = ctx.put(x[down : down + height], x[:, across : across + width])
            by_rows += ctx.subject.shard_digest(upper, (down, down + height), (0, 48))
            by_columns += ctx.subject.shard_digest(left, (0, 16), (across, across + width))
            columns = torch.arange(across, across + width, device=left.device)
            partial += ctx.subject.row_digests(left, columns)
        ctx.require(by_rows & _WORD == expected, f"rows over {tp} ranks")
        ctx.require(by_columns & _WORD == expected, f"columns over {tp} ranks")
        ctx.equal(partial, rows, f"row digests over {tp} ranks")
    ctx.degrees = ctx.setting.tp
    return f"rows and columns over {ctx.setting.tp}"


def run_to_run(ctx: Context) -> str:
    inputs = ctx.put(random(129, 512, seed=116), torch.arange(512))
    repeated(ctx, lambda: ctx.subject.row_digests(*inputs), "row digests")
    return "four calls"


SUITE = OpSuite(
    name="digest",
    checks={
        "order": order,
        "dtypes": dtypes,
        "shapes": shapes,
        "neighbours": beside,
        "tp_shards": tp_shards,
        "run_to_run": run_to_run,
    },
    absent={
        "value": "whole numbers: there is nothing to be near to",
        "phases": "a row has no phase here; see neighbours",
        "tp_ranks": "sums of whole numbers have one value in every order",
        **dict.fromkeys(("split_k", "kernel_table", "cpu_bits"), "no kernel; see order"),
    },
    fault=(("shard_digest", "order"), ("row_digests", "order")),
)
