"""What the gate runs, in the order of importance: layouts, engine settings, groups of batches.

A configuration is one start of engines and trainer. A group is a list of batches through the
running pair, and one entry of the result: `tp1:prompts`. A control has to come out different.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..layout import Layout
from ..schema import CONTRACTS, DEFAULT_CONTRACT

V1 = "qwen3_dense_true_on_policy_v1"
assert V1 in CONTRACTS and DEFAULT_CONTRACT != V1

# `bisect` is a control inside of a configuration that must otherwise be exact.
CONTROL_GROUPS = frozenset({"bisect", "parity"})
GROUPS = (
    "prompts",
    "temperature",
    "micro_batches",
    "cache",
    "chunks",
    "batch_sizes",
    "bisect",
    "training",
)
_EVERYWHERE = ("prompts", "temperature", "training")
_ALL_OFF = ("rollout.cuda_graph=false", "rollout.radix_cache=false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One start. gpus: how many it needs; `gpu_only` where a CPU cannot show it."""

    name: str
    layout: Layout
    contract: str = DEFAULT_CONTRACT
    groups: tuple[str, ...]
    num_engines: int = 1
    overrides: tuple[str, ...] = ()
    chunked: bool = True
    control: bool = False
    gpu_only: bool = False

    @property
    def gpus(self) -> int:
        return self.layout.gpus(colocate=True, num_engines=self.num_engines)


def _layout(rollout: int, train: int, pp: int = 1, cp: int = 1) -> Layout:
    return Layout(rollout_tp=rollout, train_tp=train, pp=pp, cp=cp)


def _both_contracts(name: str, layout: Layout, num_engines: int = 1) -> list[Configuration]:
    return [
        Configuration(
            name=name if contract == DEFAULT_CONTRACT else f"{name}-v1",
            layout=layout,
            contract=contract,
            groups=_EVERYWHERE,
            num_engines=num_engines,
        )
        for contract in (DEFAULT_CONTRACT, V1)
    ]


_ONE = (
    Configuration(
        name="tp1",
        layout=_layout(1, 1),
        groups=tuple(group for group in GROUPS if group not in CONTROL_GROUPS),
    ),
    Configuration(
        name="tp1-all-off",
        layout=_layout(1, 1),
        groups=("prompts", "temperature", "cache", "bisect"),
        overrides=_ALL_OFF,
        chunked=False,
    ),
    Configuration(
        name="contract-off",
        layout=_layout(1, 1),
        contract="off",
        groups=("parity",),
        overrides=("rollout.cuda_graph=false",),
        control=True,
    ),
    Configuration(
        name="stock-on-policy-target",
        layout=_layout(1, 1),
        contract="off",
        groups=("parity",),
        overrides=("rollout.cuda_graph=false", "rollout.stock_on_policy_target=fsdp"),
        control=True,
        gpu_only=True,
    ),
    Configuration(name="tp1-v1", layout=_layout(1, 1), contract=V1, groups=_EVERYWHERE),
)

_TWO_V2, _TWO_V1 = (
    [
        pair[which]
        for pair in (
            _both_contracts("tp2", _layout(2, 2)),
            _both_contracts("rollout2-train1", _layout(2, 1)),
            _both_contracts("rollout1-train2", _layout(1, 2)),
            _both_contracts("pp2", _layout(1, 1, pp=2)),
            _both_contracts("cp2", _layout(1, 1, cp=2)),
            _both_contracts("engines2", _layout(1, 1), num_engines=2),
        )
    ]
    for which in (0, 1)
)
_FOUR_V2, _FOUR_V1 = (
    [
        pair[which]
        for pair in (
            _both_contracts("tp4", _layout(4, 4)),
            _both_contracts("rollout4-train2", _layout(4, 2)),
            _both_contracts("rollout4-train1", _layout(4, 1)),
            _both_contracts("rollout4-tp2-cp2", _layout(4, 2, cp=2)),
            _both_contracts("rollout4-tp2-pp2", _layout(4, 2, pp=2)),
            _both_contracts("rollout2-engines2", _layout(2, 2), num_engines=2),
        )
    ]
    for which in (0, 1)
)
ALL: tuple[Configuration, ...] = (*_ONE, *_TWO_V2, *_TWO_V1, *_FOUR_V2, *_FOUR_V1)


def select(
    gpus: int, only: Sequence[str] = (), groups: Sequence[str] = (), *, cpu: bool = False
) -> list[Configuration]:
    """The configurations that fit `gpus` (on a CPU: as many ranks), in the order of importance;
    `only` some, in that order; `groups` instead of each one's own, controls left out.

    Raises `ValueError` for an unknown name, or a named configuration that does not fit.
    """
    by_name = {configuration.name: configuration for configuration in ALL}
    assert len(by_name) == len(ALL)
    for what, names, known in (
        ("configurations", only, tuple(by_name)),
        ("groups", groups, GROUPS),
    ):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"unknown {what} {', '.join(unknown)}; choose from {', '.join(known)}")
    chosen = [by_name[name] for name in only] or list(ALL)
    fits = [c for c in chosen if c.gpus <= gpus and not (cpu and c.gpu_only)]
    left = [c.name for c in chosen if c not in fits]
    if only and left:
        where = "a CPU cannot run it" if cpu else f"there are {gpus} GPUs"
        raise ValueError(f"{', '.join(left)}: {where}; see --list")
    if not groups:
        return fits
    return [replace(c, groups=tuple(groups)) for c in fits if not c.control]
