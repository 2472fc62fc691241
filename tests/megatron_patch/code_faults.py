"""Mistakes that such systems have made, put into the trainer's code while it scores a batch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from megatron_models import TEMPERATURE, batch_for
from megatron_tasks import Layout, _trainer

import megatron_patch.ops
from megatron_patch import autograd
from megatron_patch.checkpoint import this_place
from megatron_patch.config import RopeTable
from megatron_patch.layers.linear import PolicyRowLinear
from megatron_patch.layers.transformer_layer import PolicyTransformerLayer
from megatron_patch.schema import VocabularySegments
from megatron_patch.schema.reduction import Association

calls = 0


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A fault that never ran proves nothing."""

    def call(*args: Any, **kwargs: Any) -> Any:
        global calls
        calls += 1
        return function(*args, **kwargs)

    return call


def _op_module(name: str) -> Any:
    # `megatron_patch.ops.rms_norm` is the function; the package of that name lies under it.
    return sys.modules[f"megatron_patch.ops.{name}"]


def _plain_tree(start: int, count: int) -> Association:
    if count == 1:
        return start
    half = 1
    while 2 * half < count:
        half *= 2
    return (_plain_tree(start, half), _plain_tree(start + half, count - half))


def plain_tree(trainer: Any) -> Any:
    """Every K tile in one binary tree, where the rollout adds runs first (contract v1)."""
    return mock.patch.object(
        _op_module("row_linear.reference"),
        "run_tree",
        _counted(lambda leaves, run: _plain_tree(0, leaves)),
    )


def bias_after_the_reduce(trainer: Any) -> Any:
    """The bias on the rounded sum, where the contract adds it at the root in fp32."""

    def forward(self: Any, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = autograd.row_linear(
            input_, self.weight, None, reduction=self.reduction, ranks=self.ranks
        )
        return (out if self.bias is None else out + self.bias), None

    return mock.patch.object(PolicyRowLinear, "forward", _counted(forward))


def rope_table_in_bf16(trainer: Any) -> Any:
    """What a model-wide cast makes of the table."""
    original = RopeTable.on
    return mock.patch.object(
        RopeTable, "on", _counted(lambda self, device: original(self, device).bfloat16().float())
    )


def logits_through_bf16(trainer: Any) -> Any:
    """Rounded before the temperature divides them."""
    original = megatron_patch.ops.temperature_logits
    return mock.patch.object(
        megatron_patch.ops,
        "temperature_logits",
        _counted(lambda logits, temperature: original(logits.bfloat16().float(), temperature)),
    )


def pad_rows_in_the_softmax(trainer: Any) -> Any:
    """Every column of the padded table counts."""
    return mock.patch.object(
        VocabularySegments, "real_columns", _counted(lambda self, segment: self.width)
    )


def residual_rounded_at_the_stage_boundary(trainer: Any) -> Any:
    """The sum that crosses to the second stage in bf16."""
    original = PolicyTransformerLayer.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        stream, nothing = original(self, *args, **kwargs)
        if self.layer_number == 1:
            stream = stream.bfloat16().float()
        return stream, nothing

    return mock.patch.object(PolicyTransformerLayer, "forward", _counted(forward))


def norm_weight_before_the_rounding(trainer: Any) -> Any:
    """The normalised value is rounded once, after the weight, instead of before and after."""
    module = _op_module("rms_norm.reference")

    def rms_norm(
        x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream = x.float() if residual is None else x.float() + residual
        scale = 1.0 / module.sqrt(module.pair_sum(stream * stream) / x.shape[-1] + eps)
        return ((stream * scale.unsqueeze(-1)) * weight.float()).bfloat16(), stream

    return mock.patch.object(module, "rms_norm", _counted(rms_norm))


@contextlib.contextmanager
def stale_weights_on_one_rank(trainer: Any) -> Iterator[None]:
    """Rank 1 kept the older weights of one layer's gate and up projection after a sync."""
    global calls
    if this_place().tp_rank == 1:
        weight = trainer.model.decoder.layers[1].mlp.linear_fc1.weight
        with torch.no_grad():
            weight.copy_(weight.float() * (1 + 2**-7))
    calls += 1
    yield


FAULTS: dict[str, Callable[[Any], Any]] = {
    fault.__name__: fault
    for fault in (
        plain_tree,
        bias_after_the_reduce,
        rope_table_in_bf16,
        logits_through_bf16,
        pad_rows_in_the_softmax,
        residual_rounded_at_the_stage_boundary,
        norm_weight_before_the_rounding,
        stale_weights_on_one_rank,
    )
}


def _attach_biases(trainer: Any) -> None:
    """A bias on o_proj, which no covered checkpoint has but the op does."""
    generator = torch.Generator().manual_seed(11)
    for layer in trainer.model.decoder.layers:
        linear = layer.self_attention.linear_proj
        noise = torch.randn(linear.weight.shape[0], generator=generator)
        linear.bias = torch.nn.Parameter(noise.bfloat16(), requires_grad=False)


def taps_with_a_code_fault(
    rank: int,
    world: int,
    port: int,
    folder: str,
    name: str,
    layout: Layout,
    options: dict[str, Any],
    fault: str | None,
    biased: bool,
) -> dict[str, Any]:
    """What the taps record while the trainer scores, with the fault of that name in its code."""
    global calls
    calls = 0
    trainer = _trainer(rank, world, port, name, layout, options)
    try:
        trainer.initialize()
        trainer.load(folder)
        if biased:
            _attach_biases(trainer)
        batch = batch_for(name)
        # The first micro-batch shows every fault.
        batch = replace(
            batch,
            tokens=batch.tokens[:4],
            prompt_lengths=batch.prompt_lengths[:4],
            response_lengths=batch.response_lengths[:4],
        )
        with contextlib.nullcontext() if fault is None else FAULTS[fault](trainer):
            trainer.start_taps()
            trainer.score(batch, TEMPERATURE)
            dump = trainer.finish_taps()
        return {
            **dump,
            "calls": calls,
            "tokens": batch.tokens,
            "prompt_lengths": batch.prompt_lengths,
        }
    finally:
        trainer.shutdown()
