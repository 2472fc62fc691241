"""KernelPolicy: contract x profile x layout, what each side must switch on.

Every number comes from `schema`; this file only asks it for one model's layers and keeps the
answers, so that plan, report and error messages show the order that the kernels will follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from .layout import Layout
from .profiles import ModelProfile
from .schema import (
    DEFAULT_CONTRACT,
    get_contract,
    padded_vocabulary,
    row_reduction,
    vocabulary_segments,
)

Device = Literal["cpu", "cuda"]
CONTRACT_OFF = "off"

# With 64-wide heads the 300th token came out otherwise in decode (H200, `miles conform`).
_FLASH3_HEAD_DIM = 128
# The path of the attention on both sides -> the engine's backend of that name.
ATTENTION_BACKENDS: Mapping[str, str] = MappingProxyType(
    {"fa3": "fa3", "triton": "triton", "reference": "torch_native"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLinearPolicy:
    """One row-parallel layer: the path of its sum, and how many leaves each rank of a side owns."""

    layer: str
    k_global: int
    path: str
    num_leaves: int
    leaf_dtype: str
    rollout_leaves_per_rank: int
    train_leaves_per_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyPolicy:
    """The log-softmax: its order, its segments, and the rows of the trainer's table.

    `padded_size` is the same for every trainer TP degree.
    """

    order: str
    vocab_size: int
    num_segments: int
    width: int
    padded_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPolicy:
    """What is numerically in force. `patched` is False only for the control `off`: stock kernels on
    both sides, which must not come out exact; `contract` is then what the run goes without."""

    contract: str
    contract_digest: str
    patched: bool
    segments: int
    attention_backend: str
    row_linears: tuple[RowLinearPolicy, ...]
    vocabulary: VocabularyPolicy


def effective_contract(name: str) -> str:
    """`name` itself, or, for control `off`, the default that the run goes without."""
    return DEFAULT_CONTRACT if name == CONTRACT_OFF else get_contract(name).name


def check_family(contract: str, profile: ModelProfile) -> None:
    """Raise `ValueError` unless the contract covers the profile's family."""
    covered = get_contract(effective_contract(contract)).families
    if profile.family not in covered:
        raise ValueError(
            f"contract {effective_contract(contract)} does not cover family {profile.family} "
            f"({profile.name}); it covers: {', '.join(covered)}"
        )


def attention_path(
    asked: str, profile: ModelProfile, device: Device, capability: str | None
) -> str:
    """The attention of both sides: `reference` on a CPU; on a GPU `fa3` or `triton`.

    asked: `auto` takes FA3 on Hopper for heads of 128, else the Triton path; capability: of this
    host's GPU, such as `9.0`, or None where it is not seen, which counts as Hopper until the engine
    looks. Raises `ValueError` where the asked one cannot keep its promise.
    """
    if device == "cpu":
        if asked != "auto":
            raise ValueError(
                f"attention={asked} with --device cpu: a CPU runs the reference; drop it"
            )
        return "reference"
    hopper = capability is None or capability.startswith("9.")
    wide = profile.head_dim == _FLASH3_HEAD_DIM
    if asked == "fa3" and not wide:
        raise ValueError(
            f"attention=fa3 with {profile.name}, head_dim={profile.head_dim}: FA3's decode has the "
            f"bits of its prefill for head_dim={_FLASH3_HEAD_DIM} alone; use attention=triton"
        )
    if asked == "fa3" and not hopper:
        raise ValueError(
            f"attention=fa3 on a GPU of capability {capability}: it was shown on Hopper (9.x) "
            "alone; use attention=triton"
        )
    if asked != "auto":
        return asked
    return "fa3" if hopper and wide else "triton"


def resolve_segments(contract: str, layout: Layout, segments: int | None) -> int:
    """The number of K segments S, which is part of the numbers.

    By default the larger of the two TP degrees, so that the side with that degree runs one plain
    GEMM a rank. Raises `ValueError` where a contract without segments is given a number.
    """
    rule = get_contract(effective_contract(contract)).row_linear
    if rule.order == "segments":
        return max(layout.rollout_tp, layout.train_tp) if segments is None else segments
    if segments not in (None, rule.max_segments):
        raise ValueError(
            f"--segments {segments}: contract {effective_contract(contract)} orders its sums by "
            f"{rule.tile}-wide tiles and has no segments; drop the flag"
        )
    return rule.max_segments


def kernel_policy(
    contract: str, profile: ModelProfile, layout: Layout, segments: int, attention: str
) -> KernelPolicy:
    """The policy of a layout that `layout.validate` accepted; `ValueError` from schema if not.
    attention: from `attention_path`."""
    name = effective_contract(contract)
    rows = []
    for layer, k_global in profile.row_parallel_layers:
        reduction = row_reduction(name, k_global, rollout_tp=layout.rollout_tp, segments=segments)
        rows.append(
            RowLinearPolicy(
                layer=layer,
                k_global=k_global,
                path=reduction.path,
                num_leaves=reduction.num_leaves,
                leaf_dtype=reduction.leaf_dtype,
                rollout_leaves_per_rank=reduction.leaves_per_rank(layout.rollout_tp),
                train_leaves_per_rank=reduction.leaves_per_rank(layout.train_tp),
            )
        )
    vocabulary = vocabulary_segments(name, profile.vocab_size)
    return KernelPolicy(
        contract=name,
        contract_digest=get_contract(name).digest(),
        patched=contract != CONTRACT_OFF,
        segments=segments,
        attention_backend=attention,
        row_linears=tuple(rows),
        vocabulary=VocabularyPolicy(
            order=get_contract(name).logprob.order,
            vocab_size=vocabulary.vocab_size,
            num_segments=vocabulary.num_segments,
            width=vocabulary.width,
            padded_size=padded_vocabulary(name, profile.vocab_size),
        ),
    )
