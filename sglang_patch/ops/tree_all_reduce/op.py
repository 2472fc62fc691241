"""Sums over the ranks of a process group: the transport carries, only we add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from ..formats import require
from . import reference
from .transport import Transport, form_calls, transport_of

# Over a process group: the largest message, in bytes that a rank receives, that every rank gathers
# whole and adds. Larger ones go to their owners (all-to-all), whose sums are gathered. On two
# H200s the first was faster at 0.7 MB, the second at 21 MB.
GATHER_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A tensor-parallel group: its size, this process's rank in it, its torch process group."""

    size: int = 1
    rank: int = 0
    group: Any = None

    def __post_init__(self) -> None:
        require(
            self.size == 1 or self.group is not None,
            f"RankGroup: size={self.size} needs a torch process group",
        )

    @classmethod
    def of(cls, group: Any) -> RankGroup:
        """From a torch process group (None: a group of one)."""
        if group is None:
            return cls()
        return cls(dist.get_world_size(group), dist.get_rank(group), group)

    @property
    def transport(self) -> Transport:
        """How this group's sums travel: `transport.connect` decides."""
        return transport_of(self.group)


def _carried(x: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
    """`x` where the process group can carry it: gloo goes through host memory."""
    through_host = x.device.type != "cpu" and dist.get_backend(ranks.group) == "gloo"
    return (x.cpu() if through_host else x).contiguous()


def _gathered(x: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
    """Every rank's `x`, stacked, on x's device."""
    sent = _carried(x, ranks)
    gathered = sent.new_empty((ranks.size, *x.shape))
    if sent.device.type == "cpu":
        # gloo has no all_gather_into_tensor for bf16 in every release; a list works for all dtypes
        dist.all_gather(list(gathered.unbind(0)), sent, group=ranks.group)
    else:
        dist.all_gather_into_tensor(gathered, sent, group=ranks.group)
    return gathered.to(x.device)


def gather_ranks(x: torch.Tensor, ranks: RankGroup) -> list[torch.Tensor]:
    """Every rank's `x` (equal shapes), in rank order; no arithmetic on the way."""
    return [x] if ranks.size == 1 else list(_gathered(x, ranks).unbind(0))


def all_to_all(x: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
    """Chunk i of the first dimension goes to rank i; returns the chunks received, in rank order.

    x: [ranks.size * n, ...], any dtype; no arithmetic.
    """
    if ranks.size == 1:
        return x
    assert x.shape[0] % ranks.size == 0, (tuple(x.shape), ranks.size)
    sent = _carried(x, ranks)
    received = torch.empty_like(sent)
    # As bytes: gloo does not carry bf16 here in every release.
    dist.all_to_all_single(
        received.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8), group=ranks.group
    )
    return received.to(x.device)


def _span(count: int, bias: torch.Tensor | None, bias_ranks: int) -> int:
    """How many of `count` parts are added before the bias; 0 without one."""
    return 0 if bias is None else count // bias_ranks


def combine(
    parts: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    bias_ranks: int = 1,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The tree over the ranks' parts, all here, in rank order; one rounding, to `out_dtype`.

    parts: equal shapes [..., N], bf16 or fp32 (fp64 on a CPU); bias: [N], added in the parts' dtype
    to the sum of the first of `bias_ranks` equal groups of parts (1: at the root).
    """
    out_dtype = out_dtype or parts[0].dtype
    reference.check_ranks(len(parts), 1 if bias is None else bias_ranks)
    if parts[0].device.type != "cuda" or len(parts) == 1:
        return reference.combine(parts, bias, bias_ranks).to(out_dtype)
    from .kernel import launch_combine

    parts = [part.contiguous() for part in parts]
    out = torch.empty_like(parts[0], dtype=out_dtype)
    if out.numel():
        span = _span(len(parts), bias, bias_ranks)
        launch_combine(parts, bias, out, span=span, columns=out.shape[-1] if out.dim() else 1)
    return out


def tree_all_reduce(
    x: torch.Tensor,
    ranks: RankGroup,
    *,
    bias: torch.Tensor | None = None,
    bias_ranks: int = 1,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Sum of `x` over the ranks by the balanced tree of the schema, in x's dtype, on every rank.

    x: [..., N], the same shape on every rank; `bias`, `bias_ranks` and the one rounding to
    `out_dtype` (None: x's) as in `combine`. Power-of-two world sizes up to 8; others raise
    `ValueError`. The same bits over every transport and in every form. Not differentiable.
    """
    out_dtype = out_dtype or x.dtype
    reference.check_ranks(ranks.size, 1 if bias is None else bias_ranks)
    if ranks.size == 1 or x.numel() == 0:
        return combine([x] * ranks.size, bias, bias_ranks, out_dtype)
    if ranks.transport.workspace is not None:
        return _symmetric_all_reduce(x, ranks, bias, bias_ranks, out_dtype)
    if x.numel() * x.element_size() * (ranks.size - 1) <= GATHER_BYTES:
        form_calls["gather"] += 1
        return combine(list(_gathered(x, ranks).unbind(0)), bias, bias_ranks, out_dtype)
    form_calls["exchange"] += 1
    rows = x.reshape(-1, 1 if bias is None else x.shape[-1])
    mine = _exchanged(rows, ranks, bias, bias_ranks, out_dtype)
    whole = _gathered(mine, ranks).view(-1, rows.shape[-1])
    return whole[: rows.shape[0]].view(x.shape)


def _exchanged(
    rows: torch.Tensor,
    ranks: RankGroup,
    bias: torch.Tensor | None,
    bias_ranks: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """This rank's share of the summed rows, [ceil(rows / size), N]; all-to-all, then the tree."""
    share = -(-rows.shape[0] // ranks.size)
    missing = share * ranks.size - rows.shape[0]
    if missing:
        rows = torch.cat([rows, rows.new_zeros((missing, rows.shape[1]))])
    parts = all_to_all(rows, ranks).view(ranks.size, share, -1)
    return combine(list(parts.unbind(0)), bias, bias_ranks, out_dtype)


def takes_one_shot(x_bytes: int, ranks: RankGroup) -> bool:
    """Whether an all-reduce of so many bytes a rank goes in one shot over symmetric memory."""
    workspace = ranks.transport.workspace
    return workspace is not None and x_bytes <= workspace.areas.one_shot_bytes


def stage(rows: int, columns: int, dtype: torch.dtype, ranks: RankGroup) -> torch.Tensor | None:
    """Where to write [rows, columns] in `dtype` so that `tree_all_reduce` need not copy it: this
    rank's stage, free until that call; None where any memory will do (small, larger than the stage,
    or over a process group)."""
    workspace = ranks.transport.workspace
    if workspace is None or takes_one_shot(rows * columns * dtype.itemsize, ranks):
        return None
    whole = workspace.staged(dtype)[workspace.rank]
    return whole[: rows * columns].view(rows, columns) if rows * columns <= len(whole) else None


def _symmetric_all_reduce(
    x: torch.Tensor,
    ranks: RankGroup,
    bias: torch.Tensor | None,
    bias_ranks: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    from .kernel import launch_one_shot, launch_two_shot

    workspace = ranks.transport.workspace
    assert workspace is not None
    x = x.contiguous()
    out = torch.empty_like(x, dtype=out_dtype)
    columns = x.shape[-1] if x.dim() else 1
    span = _span(ranks.size, bias, bias_ranks)
    if takes_one_shot(x.numel() * x.element_size(), ranks):
        form_calls["one shot"] += 1
        launch_one_shot(x, bias, out, workspace, span=span, columns=columns)
        return out
    form_calls["two shots"] += 1
    staged, flat, flat_out = workspace.staged(x.dtype)[workspace.rank], x.view(-1), out.view(-1)
    fits = min(staged.numel(), ranks.size * workspace.shared(out_dtype)[0].numel())
    unit = columns if bias is not None else 1
    require(
        fits >= unit,
        f"tree_all_reduce: a row of {columns} x {x.dtype} is larger than the stage of "
        f"{workspace.areas.staged_bytes} bytes",
    )
    for start in range(0, flat.numel(), fits // unit * unit):
        piece = flat[start : start + fits // unit * unit]
        if piece.data_ptr() != staged.data_ptr():
            staged[: piece.numel()].copy_(piece)
        launch_two_shot(
            x.dtype,
            bias,
            flat_out[start : start + piece.numel()],
            workspace,
            numel=piece.numel(),
            share=_share(piece.numel(), ranks.size),
            gather=True,
            span=span,
            columns=columns,
        )
    return out


def tree_reduce_scatter(
    x: torch.Tensor,
    ranks: RankGroup,
    *,
    bias: torch.Tensor | None = None,
    bias_ranks: int = 1,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`tree_all_reduce`, of which each rank keeps its own rows: the same bits.

    x: [rows, N], the same shape on every rank; returns [ceil(rows / size), N], the rows from
    rank * ceil(rows / size) on. Rows that are missing at the end are zero, none is dropped. Not
    differentiable.
    """
    out_dtype = out_dtype or x.dtype
    require(x.dim() == 2, f"tree_reduce_scatter: {tuple(x.shape)} are not [rows, columns]")
    reference.check_ranks(ranks.size, 1 if bias is None else bias_ranks)
    if ranks.size == 1:
        return combine([x], bias, bias_ranks, out_dtype)
    rows, columns = x.shape
    share = -(-rows // ranks.size)
    if x.numel() == 0:
        return x.new_zeros((share, columns), dtype=out_dtype)
    if ranks.transport.workspace is None:
        form_calls["scatter by exchange"] += 1
        out = _exchanged(x, ranks, bias, bias_ranks, out_dtype)
    else:
        form_calls["scatter"] += 1
        out = _symmetric_reduce_scatter(x, share, ranks, bias, bias_ranks, out_dtype)
    real = min(share, max(0, rows - ranks.rank * share))
    if real < share:
        out[real:] = 0
    return out


def _symmetric_reduce_scatter(
    x: torch.Tensor,
    share: int,
    ranks: RankGroup,
    bias: torch.Tensor | None,
    bias_ranks: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Piece by piece of every rank's rows; what is past the last row is anything."""
    from .kernel import launch_two_shot

    workspace = ranks.transport.workspace
    assert workspace is not None
    (rows, columns), size = x.shape, ranks.size
    out = x.new_empty((share, columns), dtype=out_dtype)
    staged = workspace.staged(x.dtype)[workspace.rank]
    at_once = min(share, staged.numel() // (size * columns))
    require(
        at_once > 0,
        f"tree_reduce_scatter: {size} rows of {columns} x {x.dtype} are larger than the stage of "
        f"{workspace.areas.staged_bytes} bytes",
    )
    for start in range(0, share, at_once):
        count = min(at_once, share - start)
        pieces = staged[: size * count * columns].view(size, count, columns)
        for owner in range(size):
            first = owner * share + start
            real = min(count, max(0, min((owner + 1) * share, rows) - first))
            pieces[owner, :real].copy_(x[first : first + real])
        launch_two_shot(
            x.dtype,
            bias,
            out[start : start + count],
            workspace,
            numel=size * count * columns,
            share=count * columns,
            gather=False,
            span=_span(size, bias, bias_ranks),
            columns=columns,
        )
    return out


def _share(numel: int, size: int) -> int:
    """Elements a rank adds: whole cache lines, so that every rank's loads stay wide."""
    return -(-numel // (size * 64)) * 64
