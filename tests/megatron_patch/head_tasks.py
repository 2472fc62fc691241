"""What the rank processes run for the head's tests."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from megatron_models import ADVANTAGES, TEMPERATURE, batch_for
from megatron_tasks import Layout, _trainer

from megatron_patch.autograd.logprob import _Head


def in_chunks(
    rank: int,
    world: int,
    port: int,
    folder: str,
    name: str,
    layout: Layout,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Score and take a step; also (rows, columns) of every product that the head made."""
    trainer = _trainer(rank, world, port, name, layout, options)
    products: list[tuple[int, int]] = []
    original = _Head.logits

    def counted(self: _Head, x: torch.Tensor, blocks: slice) -> torch.Tensor:
        logits = original(self, x, blocks)
        products.append((logits.shape[0], logits.shape[1]))
        return logits

    try:
        trainer.initialize()
        trainer.load(folder)
        batch = batch_for(name)
        with mock.patch.object(_Head, "logits", counted):
            scores = trainer.score(batch, TEMPERATURE)
            old = [s - 0.01 for s in scores]
            train = trainer.train(batch, ADVANTAGES, old, TEMPERATURE)
        return {"scores": scores, "train": train, "products": products}
    finally:
        trainer.shutdown()


def kept_rows(
    rank: int, world: int, port: int, folder: str, name: str, layout: Layout, keep: str
) -> dict[str, Any]:
    """Score with taps that store the rows named in `keep`."""
    options = {"segments": 2, "rollout_tensor_parallel_size": 2}
    trainer = _trainer(rank, world, port, name, layout, options)
    try:
        trainer.initialize()
        trainer.load(folder)
        trainer.start_taps(keep)
        trainer.score(batch_for(name), TEMPERATURE)
        return trainer.finish_taps()
    finally:
        trainer.shutdown()
