"""`sglang.srt.model_executor.model_runner.ModelRunner`: give every module its place.

Upstream surfaces: `load_model` and `maybe_enable_batch_invariant_mode`.

The generic layer classes do not know where they stand. After loading, each module that a hook
serves gets its layer and op name (for errors, faults and counts), each row-parallel linear its
order of addition, and what the contract cannot cover is refused before the first token.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import state
from ..contracts import ATTENTION_PATHS
from ..ops.attention.op import check_path
from ..ops.tree_all_reduce.op import RankGroup
from ..ops.tree_all_reduce.transport import connect
from .target import Hook

_LAYER = re.compile(r"^model\.layers\.(\d+)\.(?:self_attn\.|mlp\.)?(\w+)$")
_OUTSIDE = {"model.norm": "final_norm", "model.embed_tokens": "embedding", "lm_head": "lm_head"}


@dataclass(frozen=True, slots=True)
class Place:
    """Layer number (None: outside the layers) and op name."""

    layer: int | None
    op: str


def place_modules(model: torch.nn.Module) -> int:
    """Name the modules that hooks serve; returns how many row-parallel linears were planned.

    Raises `ValueError` naming every module that the contract does not cover.
    """
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.linear import LinearBase, RowParallelLinear
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    policy = state.require().policy
    problems: list[str] = []
    planned = 0
    for name, module in model.named_modules():
        if not isinstance(module, (LinearBase, RMSNorm)):
            continue
        match = _LAYER.match(name)
        if match is None and name not in _OUTSIDE:
            problems.append(f"{name} ({type(module).__name__}): no such place in a dense decoder")
            continue
        place = Place(int(match[1]), match[2]) if match else Place(None, _OUTSIDE[name])
        module.true_on_policy_place = place
        if isinstance(module, RMSNorm):
            continue
        if not isinstance(module.quant_method, UnquantizedLinearMethod):
            problems.append(f"{name}: {type(module.quant_method).__name__} is quantised")
        if module.weight.dtype != torch.bfloat16:
            problems.append(f"{name}: weight is {module.weight.dtype}, the contract has bfloat16")
        if isinstance(module, RowParallelLinear):
            try:
                module.true_on_policy_reduction = policy.row_reduction(module.input_size)
            except ValueError as error:
                problems.append(f"{name}: {error}")
            planned += 1
    if not planned:
        problems.append("no row-parallel linear found")
    if problems:
        raise ValueError(
            f"{policy.contract.name} does not cover this model: " + "; ".join(problems)
        )
    return planned


def check_attention(runner: Any) -> None:
    """`ValueError` unless the attention in use is one that a trainer can reproduce."""
    backend = runner.server_args.attention_backend
    path = ATTENTION_PATHS.get(backend)
    allowed = [
        name for name, of in ATTENTION_PATHS.items() if (of == "reference") == _on_cpu(runner)
    ]
    for phase in ("prefill", "decode"):
        own = getattr(runner.server_args, f"{phase}_attention_backend", None)
        if own not in (None, backend):
            raise ValueError(
                f"{phase}_attention_backend={own!r} beside attention_backend={backend!r}: prefill "
                "and decode take one kernel"
            )
    if path is None or backend not in allowed:
        raise ValueError(
            f"attention_backend={backend!r} on {runner.device}: the contract's kernel is "
            f"{' or '.join(allowed)}"
        )
    capability = (0, 0) if _on_cpu(runner) else torch.cuda.get_device_capability()
    check_path(path, runner.device, capability, runner.model_config.head_dim)


def _on_cpu(runner: Any) -> bool:
    return bool(runner.device == "cpu")


def load_model(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Load as SGLang does, then place the modules and take this rank's group."""
    original(self, *args, **kwargs)
    from sglang.srt.distributed import get_tp_group

    check_attention(self)
    place_modules(self.model)
    group = get_tp_group()
    live = state.require()
    live.ranks = (
        RankGroup(group.world_size, group.rank_in_group, group.device_group)
        if group.world_size > 1
        else RankGroup()
    )
    assert live.ranks.size == live.policy.tensor_parallel_size
    # Now, before the engine counts the memory that is left for its cache, and captures graphs.
    place = f"cuda:{self.gpu_id}" if self.device == "cuda" else self.device
    connect(live.ranks.group, torch.device(place))


def batch_invariant_mode(original: Callable[..., None], self: Any) -> None:
    """Stay off: SGLang's mode swaps aten's mm, mean and log-softmax for Triton ones, on GPUs only.
    Every sum on the path already has the contract's order, and none of them is aten's."""


HOOKS = (
    Hook(
        name="batch_invariant_mode",
        target="sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        digest="50c417a13a23a859",
        replacement=batch_invariant_mode,
    ),
    Hook(
        name="load_model",
        target="sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        digest="d2ba5b4a96505629",
        replacement=load_model,
    ),
)
