"""Exchanges between trainer ranks: bytes are carried, sums are ours and in a written order."""

from .collectives import all_to_all, gather_partial, gather_replicated
from .packing import MicroBatch, pack
from .ulysses import heads_to_sequence, sequence_to_heads

__all__ = [
    "MicroBatch",
    "all_to_all",
    "gather_partial",
    "gather_replicated",
    "heads_to_sequence",
    "pack",
    "sequence_to_heads",
]
