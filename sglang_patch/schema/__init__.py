"""The contract as data: what rollout and trainer must agree on, and in which order they add.

Standard library only, no torch, no I/O. This folder is canonical; `tools/sync_schema.py`
copies it byte for byte into each of the three distributions.
"""

from .contract import (
    CONTRACTS,
    DEFAULT_CONTRACT,
    AttentionRule,
    EmbeddingRule,
    LogprobRule,
    NormRule,
    RopeRule,
    RowLinearRule,
    TrueOnPolicyContract,
    get_contract,
    split_bound_name,
)
from .fingerprint import Fingerprint
from .reduction import (
    RowReduction,
    association,
    local_association,
    rank_association,
    row_reduction,
    run_of,
    run_tree,
    supported_tensor_parallel_sizes,
)
from .vocabulary import VocabularySegments, padded_vocabulary, vocabulary_segments

__all__ = [
    "CONTRACTS",
    "DEFAULT_CONTRACT",
    "AttentionRule",
    "EmbeddingRule",
    "Fingerprint",
    "LogprobRule",
    "NormRule",
    "RopeRule",
    "RowLinearRule",
    "RowReduction",
    "TrueOnPolicyContract",
    "VocabularySegments",
    "association",
    "get_contract",
    "local_association",
    "padded_vocabulary",
    "rank_association",
    "row_reduction",
    "run_of",
    "run_tree",
    "split_bound_name",
    "supported_tensor_parallel_sizes",
    "vocabulary_segments",
]
