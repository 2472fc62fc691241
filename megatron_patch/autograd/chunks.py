"""How many rows and blocks of columns of the logits exist at once, in a given memory."""

from __future__ import annotations

from dataclasses import dataclass

# Rows of a tile of the products: a chunk of whole tiles wastes none.
_TILE_ROWS = 128


@dataclass(frozen=True, slots=True)
class Chunk:
    """`rows` rows by `blocks` blocks of columns at a time."""

    rows: int
    blocks: int


def chunk(rows: int, blocks: int, *, row_bytes: int, block_bytes: int, memory_bytes: int) -> Chunk:
    """The largest chunk that `memory_bytes` hold, of `rows` rows and `blocks` blocks (a power of
    two); at least one row of one block.

    A row takes `row_bytes`, and `block_bytes` more for each block. Rows come first, for each pass
    over the rows reads the weight once more; blocks fill what is left. From 128 rows on, whole
    tiles of 128. The same on every tensor-parallel rank, which exchange a chunk's numbers.
    """
    most = max(1, memory_bytes // (row_bytes + block_bytes))
    if rows <= most:
        together = 1
        while 2 * together <= blocks and (
            rows * (row_bytes + 2 * together * block_bytes) <= memory_bytes
        ):
            together *= 2
        return Chunk(max(1, rows), together)
    return Chunk(most // _TILE_ROWS * _TILE_ROWS or most, 1)
