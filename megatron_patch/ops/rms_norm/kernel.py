"""RMSNorm, with or without the fp32 residual add, in one launch; the reference's order, step for
step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from ..elementary_kernel import UNFUSED, pair_sum, tree_sum
from ..formats import require
from ..launch import launch

_MAX_HIDDEN = 32768


@dataclass(frozen=True, slots=True)
class NormTile:
    """Launch constants for rows of at most `columns` elements: a program takes `height` rows, each
    in chunks of `chunk` columns."""

    columns: int
    height: int
    chunk: int
    warps: int


# 16 elements a thread, two 16-byte loads of x: measured best from one row to many thousands. Bits
# do not depend on this table: the sum over a row is a written tree.
TILES: Final = (
    NormTile(columns=128, height=16, chunk=128, warps=4),
    NormTile(columns=1024, height=1, chunk=1024, warps=2),
    NormTile(columns=2048, height=1, chunk=2048, warps=4),
    NormTile(columns=4096, height=1, chunk=4096, warps=8),
    NormTile(columns=8192, height=1, chunk=8192, warps=16),
    NormTile(columns=_MAX_HIDDEN, height=1, chunk=4096, warps=16),
)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x_ptr, weight_ptr, residual_ptr, out_ptr, stream_ptr, rows, x_stride, residual_stride, eps,
    HIDDEN: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LEVELS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK_LEVELS: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program: x [rows, HIDDEN] (+ residual fp32 -> stream fp32) -> out bf16.

    A row is CHUNKS blocks of COLUMNS elements; the tree over it is the blocks' trees, then the tree
    over the blocks."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    streams = ()
    for chunk in tl.static_range(CHUNKS):
        at = chunk * COLUMNS + column
        inside = row < rows
        if (chunk + 1) * COLUMNS > HIDDEN:
            inside = inside & (at < HIDDEN)
        stream = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + row * residual_stride + at, mask=inside, other=0.0)
            stream = stream + residual
            tl.store(stream_ptr + row * HIDDEN + at, stream, mask=inside)
        streams = streams + (stream,)  # type: ignore[assignment]
    totals = ()
    for chunk in tl.static_range(CHUNKS):
        stream = streams[chunk]
        square = pair_sum(stream * stream, ROWS, COLUMNS, LEVELS)
        totals = totals + (square,)  # type: ignore[assignment]
    total = tree_sum(totals, CHUNKS, CHUNK_LEVELS)
    mean_square = tl.div_rn(total, tl.full((ROWS,), HIDDEN, tl.float32))
    root = tl.sqrt_rn(mean_square + eps)
    scale = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), root)[:, None]
    for chunk in tl.static_range(CHUNKS):
        at = chunk * COLUMNS + column
        inside = row < rows
        within = column < COLUMNS
        if (chunk + 1) * COLUMNS > HIDDEN:
            within = at < HIDDEN
            inside = inside & within
        weight = tl.load(weight_ptr + at, mask=within, other=0.0).to(tl.float32)
        normalised = (streams[chunk] * scale).to(out_ptr.dtype.element_ty)
        out = (normalised.to(tl.float32) * weight).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * HIDDEN + at, out, mask=inside)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, hidden] with a dense last dimension, a copy only where the strides demand one."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    stream: torch.Tensor | None,
    tile: NormTile | None,
) -> None:
    hidden = x.shape[-1]
    require(
        x.dtype in (torch.bfloat16, torch.float32) and 0 < hidden <= _MAX_HIDDEN,
        f"rms_norm kernel: x is {x.dtype} with hidden={hidden}; it takes bfloat16 or float32 and "
        f"hidden up to {_MAX_HIDDEN} (fp64 gradchecks run on the CPU reference)",
    )
    flat, other = _rows(x), None if residual is None else _rows(residual)
    rows = flat.shape[0]
    if rows == 0:
        return
    tile = tile or next(t for t in TILES if hidden <= t.columns)
    columns = min(tile.chunk, triton.next_power_of_2(hidden))
    chunks = triton.cdiv(hidden, columns)
    launch(
        rms_norm_kernel,
        (triton.cdiv(rows, tile.height),),
        (
            flat,
            weight.contiguous(),
            other,
            out,
            stream,
            rows,
            flat.stride(0),
            hidden if other is None else other.stride(0),
            eps,
        ),
        {
            "HIDDEN": hidden,
            "HAS_RESIDUAL": other is not None,
            "ROWS": tile.height,
            "COLUMNS": columns,
            "LEVELS": columns.bit_length() - 1,
            "CHUNKS": chunks,
            "CHUNK_LEVELS": (chunks - 1).bit_length(),
            "num_warps": tile.warps,
            **UNFUSED,
        },
    )


def launch_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, tile: NormTile | None = None
) -> torch.Tensor:
    """See `op.rms_norm`; x [..., hidden] bf16 or fp32, up to 32768 wide, else `ValueError`."""
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    _launch(x, weight, None, eps, out, None, tile)
    return out


def launch_add_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    eps: float,
    *,
    tile: NormTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.rms_norm` with a residual; dtypes and widths as `launch_rms_norm`."""
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    stream = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _launch(x, weight, residual, eps, out, stream, tile)
    return out, stream
