"""The vocabulary as fixed segments, so that a log-softmax has one order at every sharding."""

from __future__ import annotations

from dataclasses import dataclass

from .contract import get_contract


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularySegments:
    """`num_segments` segments of `width` columns over the real vocabulary order.

    Columns from `vocab_size` on are padding: they never enter a max or a sum. A segment may hold
    no real column at all (a small vocabulary); it then contributes nothing.
    """

    vocab_size: int
    num_segments: int
    width: int

    @property
    def padded_size(self) -> int:
        return self.num_segments * self.width

    def real_columns(self, segment: int) -> int:
        """How many columns of `segment` are real (the rest are padding)."""
        return max(0, min(self.width, self.vocab_size - segment * self.width))

    def shard(self, tensor_parallel_size: int, rank: int) -> tuple[int, int]:
        """Column range `[start, stop)` of the padded table that one trainer rank owns."""
        if not 0 <= rank < tensor_parallel_size:
            raise ValueError(f"rank {rank} is not one of {tensor_parallel_size}")
        if self.num_segments % tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size} does not divide the "
                f"{self.num_segments} vocabulary segments"
            )
        width = self.padded_size // tensor_parallel_size
        return rank * width, (rank + 1) * width


def padded_vocabulary(contract_name: str, vocab_size: int) -> int:
    """Rows of the trainer's embedding and head tables: whole segments at TP 1, 2, 4 and 8.

    Where the contract gathers the shards first, any equal shards do; the same multiple is used.
    """
    rule = get_contract(contract_name).logprob
    block = rule.num_segments * rule.segment_multiple
    return block * -(-vocab_size // block)


def vocabulary_segments(contract_name: str, vocab_size: int) -> VocabularySegments:
    """Segments of a real vocabulary: the width is a multiple of 64, `64 * ceil(V / 512)` for 8.

    Where the contract gathers the shards first, the whole real vocabulary is one segment.
    """
    rule = get_contract(contract_name).logprob
    if vocab_size < 1:
        raise ValueError(f"vocab_size={vocab_size} must be positive")
    if rule.order == "gather":
        return VocabularySegments(vocab_size=vocab_size, num_segments=1, width=vocab_size)
    block = rule.num_segments * rule.segment_multiple
    return VocabularySegments(
        vocab_size=vocab_size,
        num_segments=rule.num_segments,
        width=rule.segment_multiple * -(-vocab_size // block),
    )
