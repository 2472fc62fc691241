"""RMSNorm with the fp32 residual add in one launch; the reference's order, step for step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..elementary_kernel import UNFUSED, pair_sum
from ..formats import require

_MAX_HIDDEN = 32768


@dataclass(frozen=True, slots=True)
class NormTile:
    """Launch constants for rows padded to at most `columns` (a power of two)."""

    columns: int
    rows: int
    warps: int


# About 2048 to 4096 elements a program keep a row in registers (16 to 32 a thread); short rows, the
# heads of a q/k norm, share a program. Bits do not depend on this table: each sum is a written
# tree.
TILES = (
    NormTile(columns=128, rows=16, warps=4),
    NormTile(columns=1024, rows=2, warps=4),
    NormTile(columns=4096, rows=1, warps=4),
    NormTile(columns=8192, rows=1, warps=8),
    NormTile(columns=_MAX_HIDDEN, rows=1, warps=16),
)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    stream_ptr,
    rows,
    x_stride,
    residual_stride,
    eps,
    HIDDEN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """ROWS rows a program: x [rows, HIDDEN] (+ residual fp32) -> out bf16 and stream fp32."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < HIDDEN)
    stream = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        stream = stream + tl.load(
            residual_ptr + row * residual_stride + column, mask=inside, other=0.0
        )
    tl.store(stream_ptr + row * HIDDEN + column, stream, mask=inside)
    total = pair_sum(stream * stream, ROWS, COLUMNS, LEVELS)
    mean_square = tl.div_rn(total, tl.full((ROWS,), HIDDEN, tl.float32))
    root = tl.sqrt_rn(mean_square + eps)
    scale = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), root)
    normalised = (stream * scale[:, None]).to(out_ptr.dtype.element_ty)
    weight = tl.load(weight_ptr + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    out = (normalised.to(tl.float32) * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HIDDEN + column, out, mask=inside)


def launch_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.rms_norm`; x [..., hidden] bf16 or fp32, up to 32768 wide, else `ValueError`."""
    hidden = x.shape[-1]
    require(
        x.dtype in (torch.bfloat16, torch.float32) and 0 < hidden <= _MAX_HIDDEN,
        f"rms_norm kernel: x is {x.dtype} with hidden={hidden}; it takes bfloat16 or float32 and "
        f"hidden up to {_MAX_HIDDEN} (fp64 gradchecks run on the CPU reference)",
    )
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    stream = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    flat = x.reshape(-1, hidden)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    other = None if residual is None else residual.reshape(-1, hidden).contiguous()
    if flat.shape[0] == 0:
        return out, stream
    columns = triton.next_power_of_2(hidden)
    tile = next(t for t in TILES if columns <= t.columns)
    rms_norm_kernel[(triton.cdiv(flat.shape[0], tile.rows),)](
        flat,
        weight.contiguous(),
        other,
        out,
        stream,
        flat.shape[0],
        flat.stride(0),
        hidden,
        eps,
        HIDDEN=hidden,
        HAS_RESIDUAL=other is not None,
        ROWS=tile.rows,
        COLUMNS=columns,
        LEVELS=columns.bit_length() - 1,
        num_warps=tile.warps,
        **UNFUSED,
    )
    return out, stream
