"""Contract identities and their typed fields; a registry by name.

A contract says which numbers two engines must share: formats, rounding points and the
association of every sum. It holds no code. A new architecture is one new object here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Literal

DType = Literal["bfloat16", "float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRule:
    """A token's row of the table, in the dtype of the table; no arithmetic."""

    dtype: DType = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormRule:
    """RMSNorm. `x + residual` and the variance are in `residual_dtype`; the normalised value is
    rounded to `rounded_dtype` before it meets the fp32 weight; the product is rounded to bf16."""

    residual_dtype: DType = "float32"
    rounded_dtype: DType = "bfloat16"
    weight_dtype: DType = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRule:
    """Rotary embedding: one cos/sin table in `table_dtype`, made on the CPU from fp32 frequencies;
    products and sums in fp32, each rounded (no fused multiply-add), the result in bf16."""

    table_dtype: DType = "float32"
    fused_multiply_add: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """Same kernel on both sides, with one order for prefill and decode; `num_splits` is FA3's. The
    Triton path adds chunks of keys that start at fixed places of the sequence."""

    num_splits: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLinearRule:
    """How a sum over K that tensor parallelism cuts is associated (see `reduction.py`).

    `tiles`: fixed-width K tiles, each rounded to `leaf_dtype`, runs then a tree (v1).
    `segments`: the global K in S equal segments, leaves of a balanced tree (v2).
    `bias`: `rank0` adds it to the first rollout rank's product, before the ranks are summed;
    `root` adds it once, in `leaf_dtype`, after the whole tree.
    """

    order: Literal["tiles", "segments"]
    leaf_dtype: DType
    bias: Literal["rank0", "root"]
    tile: int = 0
    max_segments: int = 1
    max_tensor_parallel_size: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRule:
    """From logits to the logprob of the sampled token.

    The lm_head product leaves its fp32 accumulator as `logits_dtype`; temperature division and
    log-softmax are in `dtype`. `gather`: shards are gathered and
    cut to the real vocabulary first. `segments`: max and sum-exp of `num_segments` fixed segments
    of the real vocabulary, each a multiple of `segment_multiple` columns, combined in a fixed tree.
    """

    order: Literal["gather", "segments"]
    logits_dtype: DType
    dtype: DType = "float32"
    num_segments: int = 8
    segment_multiple: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueOnPolicyContract:
    """Everything that must be equal for `rollout logprob - trainer logprob == 0.0` in fp32."""

    name: str
    summary: str
    families: tuple[str, ...]
    row_linear: RowLinearRule
    logprob: LogprobRule
    embedding: EmbeddingRule = EmbeddingRule()
    norm: NormRule = NormRule()
    rope: RopeRule = RopeRule()
    attention: AttentionRule = AttentionRule()

    def digest(self) -> str:
        """SHA-256 (64 hex digits) over every field, so that an edited field is another contract."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


_V1 = TrueOnPolicyContract(
    name="qwen3_dense_true_on_policy_v1",
    summary="the published SGLang order: 128-wide K tiles carried in bf16, runs then a tree",
    families=("qwen3_dense", "qwen2_dense"),
    row_linear=RowLinearRule(order="tiles", leaf_dtype="bfloat16", bias="rank0", tile=128),
    logprob=LogprobRule(order="gather", logits_dtype="bfloat16"),
)

_V2 = TrueOnPolicyContract(
    name="qwen3_dense_true_on_policy_v2",
    summary="S segments of the global K in an fp32 tree, one rounding at the end",
    families=("qwen3_dense", "qwen2_dense"),
    row_linear=RowLinearRule(order="segments", leaf_dtype="float32", bias="root", max_segments=8),
    logprob=LogprobRule(order="segments", logits_dtype="float32"),
)

CONTRACTS: Mapping[str, TrueOnPolicyContract] = MappingProxyType({c.name: c for c in (_V1, _V2)})
DEFAULT_CONTRACT = _V2.name


def get_contract(name: str) -> TrueOnPolicyContract:
    """The contract called `name`; `ValueError` that lists the choices when there is none."""
    try:
        return CONTRACTS[name]
    except KeyError:
        raise ValueError(
            f"unknown contract {name!r}; choose one of: {', '.join(CONTRACTS)}"
        ) from None


def split_bound_name(text: str) -> tuple[str, int | None]:
    """Split `NAME` or `NAME:segments=S`, the form in which one string carries contract and plan.

    SGLang takes one string (`--true-on-policy-contract`), but the number of segments is part of
    the numbers, so it travels with the name. Raises `ValueError` for any other form.
    """
    name, colon, tail = text.partition(":")
    get_contract(name)
    if not colon:
        return name, None
    key, equals, value = tail.partition("=")
    if key != "segments" or not equals or not value.isdecimal():
        raise ValueError(f"cannot read {text!r}: write NAME or NAME:segments=S")
    return name, int(value)
