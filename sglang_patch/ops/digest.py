"""Digests that both sides compute: of the vendored text, and of sharded weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from ..schema.fingerprint import text_digest

# Odd 64-bit constants of splitmix64 (Steele, Lea & Flood, 2014), as signed integers.
_GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685
_CHUNK = 1 << 22
_INTEGERS = {2: torch.int16, 4: torch.int32}


def source_digest(folder: Path) -> str:
    """SHA-256 (hex) over the Python files below `folder`, by relative name and content."""
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.py")
    }
    if not files:
        raise ValueError(f"no Python files below {folder}")
    return text_digest(files)


def table_digest(table: torch.Tensor) -> str:
    """SHA-256 (hex) over the bytes of a tensor, for the RoPE table."""
    return hashlib.sha256(table.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def _mix(z: torch.Tensor) -> torch.Tensor:
    # int64 arithmetic wraps; masking after >> makes the shift a logical one.
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def shard_digest(shard: torch.Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> int:
    """A shard's contribution to its tensor's digest, as an unsigned 64-bit number.

    `shard` is the block `[rows, columns]` (half-open ranges) of a global matrix whose width is at
    most 2**31; a vector is one column. Contributions of disjoint shards add modulo 2**64, so every
    sharding of the same bits has the same sum. Raises `ValueError` when the ranges do not fit.
    """
    expected = (rows[1] - rows[0], columns[1] - columns[0])
    matrix = shard.detach()
    matrix = matrix.unsqueeze(1) if matrix.dim() == 1 else matrix
    if tuple(matrix.shape) != expected:
        raise ValueError(f"shard_digest: shard {tuple(matrix.shape)} is not {expected}")
    if not matrix.numel():
        return 0
    if matrix.element_size() not in _INTEGERS:
        raise ValueError(f"shard_digest: {matrix.dtype} is not a 16- or 32-bit format")
    integer = _INTEGERS[matrix.element_size()]
    column_ids = torch.arange(columns[0], columns[1], device=matrix.device, dtype=torch.int64)
    # int64 wraps, and the host is asked once.
    total = torch.zeros((), dtype=torch.int64, device=matrix.device)
    step = max(1, _CHUNK // max(1, matrix.shape[1]))
    for start in range(0, matrix.shape[0], step):
        block = matrix[start : start + step].contiguous().view(integer).to(torch.int64)
        row_ids = torch.arange(
            rows[0] + start, rows[0] + start + block.shape[0], device=matrix.device
        )
        place = (row_ids[:, None] << 31) + column_ids[None, :]
        total += _mix(_mix(place * _GOLDEN) + block).sum()
    return int(total.item()) & 0xFFFFFFFFFFFFFFFF


def row_digests(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """One 64-bit digest a row, as signed integers [rows] int64 on the CPU.

    rows: [rows, width] in a 16- or 32-bit format; columns: [width] int64, each element's column in
    the global row, or -1 for one that does not count. A digest is a sum modulo 2**64 of mixed
    (column, bits), so the digests of a row's disjoint shards add up to that of the whole row,
    however it was cut. Raises `ValueError` where the widths differ.
    """
    if rows.dim() != 2 or columns.shape != rows.shape[1:]:
        raise ValueError(
            f"row_digests: rows {tuple(rows.shape)} and columns {tuple(columns.shape)}; give one "
            "column number for each element of a row"
        )
    if rows.element_size() not in _INTEGERS:
        raise ValueError(f"row_digests: {rows.dtype} is not a 16- or 32-bit format")
    integer = _INTEGERS[rows.element_size()]
    places, counted = _mix(columns * _GOLDEN), columns >= 0
    sums = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
    step = max(1, _CHUNK // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        block = rows.detach()[start : start + step].contiguous().view(integer).to(torch.int64)
        mixed = torch.where(counted, _mix(places + block), 0)
        sums[start : start + step] = mixed.sum(dim=1)
    return sums.cpu()


def weights_digest(tensors: dict[str, int]) -> str:
    """SHA-256 (hex) over the per-tensor sums of all shards, by Hugging Face name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name}={tensors[name] & 0xFFFFFFFFFFFFFFFF:016x}\n".encode())
    return digest.hexdigest()
