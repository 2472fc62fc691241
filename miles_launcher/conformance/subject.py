"""What is under test: the one file of the suite that imports the ops.

A `Subject` is the ops as callables, so that a test can put a broken one in the place of any. On a
CPU they are the public ops, which run the reference; on a GPU the same, which run the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

import sglang_patch
import sglang_patch.ops as ops
from sglang_patch.ops import elementary
from sglang_patch.ops.digest import row_digests, shard_digest, source_digest
from sglang_patch.ops.tree_all_reduce.transport import connect
from sglang_patch.schema import (
    CONTRACTS,
    RowReduction,
    VocabularySegments,
    row_reduction,
    vocabulary_segments,
)

from .bits import one_ulp

__all__ = [
    "CONTRACTS",
    "RowReduction",
    "Subject",
    "VocabularySegments",
    "connect",
    "cpu_subject",
    "elementary",
    "ops",
    "row_reduction",
    "text_digests",
    "vocabulary_segments",
]

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Kernels behind one op: `entries` of a table (opaque; shown by their repr) and `run`, which
    takes an entry before the arguments of the op's launcher."""

    entries: tuple[Any, ...]
    run: Function


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Entries of `row_linear` that are fitted to a shape before they are launched: `compare` runs
    some of them against the general kernel and the oracle, and raises AssertionError."""

    entries: tuple[Any, ...]
    splitting: tuple[Any, ...]
    compare: Callable[[list[Any]], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The ops of one device. `tables` are empty where the reference runs."""

    exp: Function
    log: Function
    pair_sum: Function
    sqrt: Function | None
    linear: Function
    row_linear: Function
    row_linear_partial: Function
    matmul_tp_inv: Function
    combine_partials: Function
    gather_ranks: Function
    tree_all_reduce: Function
    tree_reduce_scatter: Function
    rms_norm: Function
    rope_table: Function
    rope: Function
    qk_norm_rope: Function
    silu_mul: Function
    attention: Function
    temperature_logits: Function
    segment_statistics: Function
    token_statistics: Function
    combine_segments: Function
    combine_entropy: Function
    log_softmax: Function
    logits_gradient: Function
    shard_digest: Function
    row_digests: Function
    tables: tuple[tuple[str, Table], ...] = ()
    # By contract. Entries whose launch depends on the shape bring their own comparison.
    fitted: tuple[tuple[str, Fitted], ...] = ()

    def table(self, name: str) -> Table | None:
        """The table behind the op called `name`, or None."""
        return dict(self.tables).get(name)

    def with_fault(self, name: str) -> Subject:
        """This subject, where the op called `name` returns its result one ulp off."""
        assert name in {f.name for f in fields(self)} - {"tables", "fitted"}, name
        changed: dict[str, Any] = {name: OneUlp(getattr(self, name))}
        return replace(self, **changed)


@dataclass(frozen=True, slots=True)
class OneUlp:
    """A function whose first returned tensor has its first element moved by one ulp."""

    function: Function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(*args, **kwargs)
        if isinstance(result, int):
            return result ^ 1
        if isinstance(result, torch.Tensor):
            return one_ulp(result) if result.numel() else result
        first, *rest = result
        return (one_ulp(first) if first.numel() else first, *rest)


def cpu_subject() -> Subject:
    """The public ops where they run the reference."""
    return Subject(
        exp=elementary.exp,
        log=elementary.log,
        sqrt=elementary.sqrt,
        pair_sum=elementary.pair_sum,
        shard_digest=shard_digest,
        row_digests=row_digests,
        **{name: getattr(ops, name) for name in ops.__all__ if name != "RankGroup"},
    )


def text_digests() -> dict[str, str]:
    """SHA-256 of the ops' and the schema's text, as every rank's fingerprint carries them."""
    package = Path(sglang_patch.__file__).resolve().parent
    return {
        "ops_digest": source_digest(package / "ops"),
        "schema_digest": source_digest(package / "schema"),
    }
