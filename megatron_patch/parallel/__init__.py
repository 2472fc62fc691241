"""Exchanges between trainer ranks: bytes are carried, sums are ours and in a written order."""

from .collectives import gather_partial, gather_replicated, gather_rows, reduce_scatter_rows
from .packing import MicroBatch, pack
from .ulysses import heads_to_sequence, sequence_to_heads

__all__ = [
    "MicroBatch",
    "gather_partial",
    "gather_replicated",
    "gather_rows",
    "heads_to_sequence",
    "pack",
    "reduce_scatter_rows",
    "sequence_to_heads",
]
