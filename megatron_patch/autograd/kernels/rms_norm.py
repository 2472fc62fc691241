"""Backward of RMSNorm, with the residual's gradient added, in one launch."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from ...ops.formats import require
from ...ops.launch import launch
from . import processors
from .columns import add_pairs

_MAX_HIDDEN: Final = 32768
# A row is taken in at most eight chunks, of this many columns at least; eight elements a thread.
_COLUMNS: Final = 1024
_CHUNKS: Final = 8
_ELEMENTS: Final = 8
# Programs a processor: as many as the registers of a row of so many columns leave room for, so that
# all run at once and each gets as many rows (or one fewer).
_RESIDENT: Final = ((1024, 7), (3072, 4), (4096, 3), (_MAX_HIDDEN, 2))


@triton.jit(do_not_specialize=["rows", "programs"])
def rms_norm_backward_kernel(
    stream_ptr, weight_ptr, out_gradient_ptr, stream_gradient_ptr, x_gradient_ptr,
    residual_gradient_ptr, parts_ptr, rows, programs, eps, HIDDEN: tl.constexpr,
    HAS_STREAM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Program p takes the rows p, p + programs, ..., each in CHUNKS blocks of COLUMNS elements, and
    adds up their share of the weight's gradient in this order."""
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)[None, :]
    totals = ()
    for _ in tl.static_range(CHUNKS):
        totals = totals + (tl.zeros((1, COLUMNS), tl.float32),)  # type: ignore[assignment]
    for number in range(program, rows, programs):
        row = tl.cast(number, tl.int64) * HIDDEN
        squares = tl.zeros((1, COLUMNS), tl.float32)
        products = tl.zeros((1, COLUMNS), tl.float32)
        carried = ()
        kept = ()
        for chunk in tl.static_range(CHUNKS):
            at = chunk * COLUMNS + column
            within = at < HIDDEN
            s = tl.load(stream_ptr + row + at, mask=within, other=0.0).to(tl.float32)
            dy = tl.load(out_gradient_ptr + row + at, mask=within, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + at, mask=within, other=0.0).to(tl.float32)
            if HAS_STREAM:
                given = tl.load(stream_gradient_ptr + row + at, mask=within, other=0.0)
                carried = carried + (given,)  # type: ignore[assignment]
            if not AGAIN:
                kept = kept + (s, dy)  # type: ignore[assignment]
            squares += s * s
            products += dy * weight * s
        square, product = tl.reduce((squares, products), 1, add_pairs)
        scale = 1.0 / tl.sqrt_rn(square / HIDDEN + eps)
        shared = (product / HIDDEN * scale * scale)[:, None]
        scale = scale[:, None]
        sums = ()
        for chunk in tl.static_range(CHUNKS):
            at = chunk * COLUMNS + column
            within = at < HIDDEN
            # From the cache: held in registers over the reduction, a row would leave room for fewer
            # programs, and so for fewer loads in flight.
            if AGAIN:
                s = tl.load(
                    stream_ptr + row + at, mask=within, other=0.0, eviction_policy="evict_first"
                ).to(tl.float32)
                dy = tl.load(
                    out_gradient_ptr + row + at, mask=within, other=0.0,
                    eviction_policy="evict_first",
                ).to(tl.float32)  # fmt: skip
            else:
                s = kept[2 * chunk]
                dy = kept[2 * chunk + 1]
            weight = tl.load(
                weight_ptr + at, mask=within, other=0.0, eviction_policy="evict_last"
            ).to(tl.float32)
            ds = scale * (dy * weight - s * shared)
            if HAS_STREAM:
                ds += carried[chunk]
            narrow = ds.to(x_gradient_ptr.dtype.element_ty)
            tl.store(x_gradient_ptr + row + at, narrow, mask=within)
            if HAS_RESIDUAL:
                tl.store(residual_gradient_ptr + row + at, ds, mask=within)
            # The weight multiplied the rounded value.
            total = totals[chunk] + dy * (s * scale).to(tl.bfloat16).to(tl.float32)
            sums = sums + (total,)  # type: ignore[assignment]
        totals = sums
    if HAS_WEIGHT:
        for chunk in tl.static_range(CHUNKS):
            at = chunk * COLUMNS + column
            tl.store(parts_ptr + program * HIDDEN + at, totals[chunk], mask=at < HIDDEN)


def launch_rms_norm_backward(
    stream: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out_gradient: torch.Tensor,
    stream_gradient: torch.Tensor | None,
    x_dtype: torch.dtype,
    *,
    residual: bool,
    weight_gradient: bool = True,
    resident: int | None = None,
    columns: int | None = None,
    again: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Gradients of `rms_norm`: (of x in `x_dtype`; of the residual, fp32, where `residual`; of the
    weight [programs, hidden] fp32, to be added over programs).

    stream: [..., hidden], what was normalised, fp32 or bf16; out_gradient: like it, bf16;
    stream_gradient: like it, fp32, or None. Raises `ValueError` above a width of 32768.
    """
    hidden = stream.shape[-1]
    require(
        0 < hidden <= _MAX_HIDDEN and stream.dtype in (torch.bfloat16, torch.float32),
        f"rms_norm backward: {stream.dtype} with hidden={hidden}; it takes bfloat16 or float32 "
        f"and hidden up to {_MAX_HIDDEN}",
    )
    inputs = [stream.contiguous(), weight.contiguous(), out_gradient.contiguous()]
    carried = None if stream_gradient is None else stream_gradient.contiguous()
    dx = torch.empty(stream.shape, dtype=x_dtype, device=stream.device)
    dresidual = torch.empty_like(dx, dtype=torch.float32) if residual else None
    rows = stream.numel() // hidden
    resident = resident or next(count for width, count in _RESIDENT if hidden <= width)
    programs = max(1, min(rows, resident * processors(stream.device)))
    parts = torch.empty((programs, hidden), dtype=torch.float32, device=stream.device)
    whole = triton.next_power_of_2(hidden)
    columns = columns or min(whole, max(_COLUMNS, whole // _CHUNKS))
    launch(
        rms_norm_backward_kernel,
        (programs,),
        (
            *inputs,
            carried,
            dx,
            dresidual,
            parts,
            rows,
            programs,
            eps,
        ),
        {
            "HIDDEN": hidden,
            "HAS_STREAM": carried is not None,
            "HAS_RESIDUAL": residual,
            "HAS_WEIGHT": weight_gradient,
            "COLUMNS": columns,
            "CHUNKS": triton.cdiv(hidden, columns),
            "AGAIN": again,
            "num_warps": max(1, columns // (32 * _ELEMENTS)),
        },
    )
    return dx, dresidual, parts
