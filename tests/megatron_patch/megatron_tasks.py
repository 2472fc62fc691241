"""What the rank processes run. Every task takes (rank, world, port, ...) and returns plain data."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron_models import ADVANTAGES, SHAPES, TEMPERATURE, batch_for
from megatron_patch import readback
from megatron_patch.checkpoint import hf_folder_digest, this_place
from megatron_patch.hf_layout import blocks
from miles_launcher.runtime.trainer_rank import TrainerRank, TrainerRankConfig

Layout = tuple[int, int, int]


def _trainer(
    rank: int, world: int, port: int, name: str, layout: Layout, options: dict[str, Any]
) -> TrainerRank:
    tp, pp, cp = layout
    shape = SHAPES[name]
    settings: dict[str, Any] = {
        "contract": "qwen3_dense_true_on_policy_v2",
        "segments": 4,
        "rollout_tensor_parallel_size": 1,
        "micro_batch_size": 4,
        "lr": 1e-3,
    }
    settings |= {f.name: getattr(shape, f.name) for f in fields(shape)}
    return TrainerRank(
        TrainerRankConfig(
            rank=rank,
            world_size=world,
            master_port=port,
            device="cpu",
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            context_parallel_size=cp,
            **{**settings, **options},
        )
    )


def _gradients(trainer: TrainerRank) -> dict[str, Any]:
    """(rows, columns, fp32 values) of this rank's share of every Hugging Face tensor's gradient."""
    parameters = dict(trainer.model.named_parameters())
    found: dict[str, Any] = {}
    for block in blocks(trainer.shape, this_place(), trainer.padded_vocab_size):
        if block.counted:
            start, stop = block.local_rows
            values = parameters[block.parameter].main_grad[start:stop].clone().numpy()
            found.setdefault(block.name, []).append((block.rows, block.columns, values))
    return found


def padding_gradient(trainer: TrainerRank) -> float:
    """Largest gradient in the padding rows of this rank's tables; -1 where it holds none."""
    largest = -1.0
    for name, parameter in trainer.model.named_parameters():
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            first = this_place().tp_rank * parameter.shape[0]
            rows = parameter.main_grad[max(0, trainer.shape.vocab_size - first) :]
            if rows.numel():
                largest = max(largest, float(rows.abs().max()))
    return largest


def score_and_train(
    rank: int,
    world: int,
    port: int,
    folder: str,
    name: str,
    layout: Layout,
    options: dict[str, Any],
    want: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Score; with `train` in want, take one step; with `gradients` return them too."""
    trainer = _trainer(rank, world, port, name, layout, options)
    try:
        trainer.initialize()
        trainer.load(folder)
        readback.reset_calls()
        batch = batch_for(name)
        scores = trainer.score(batch, TEMPERATURE)
        result: dict[str, Any] = {
            "scores": scores,
            "readback": trainer.readback(),
            "digest": trainer.weights_digest(),
        }
        if "again" in want:
            result["again"] = trainer.score(batch, TEMPERATURE)
        if "train" in want:
            # Not the scores themselves: a ratio of exactly 1 would hide a clipping error.
            old = [s - np.float32(0.01) for s in scores]
            result["train"] = trainer.train(batch, ADVANTAGES, old, TEMPERATURE)
            result["gradients"] = _gradients(trainer) if "gradients" in want else None
            result["padding_gradient"] = padding_gradient(trainer)
            result["digest_after"] = trainer.weights_digest()
            result["scores_after"] = trainer.score(batch, TEMPERATURE)
        return result
    finally:
        trainer.shutdown()


def whole_gradients(results: list[dict[str, Any]], name: str) -> dict[str, np.ndarray]:
    """Put the ranks' shares together (context-parallel replicas overwrite each other)."""
    from megatron_patch.hf_layout import hf_tensors

    whole = {k: np.full(v, np.nan, np.float32) for k, v in hf_tensors(SHAPES[name]).items()}
    for result in results:
        for key, parts in result["gradients"].items():
            for rows, columns, values in parts:
                where = slice(*rows) if columns is None else (slice(*rows), slice(*columns))
                whole[key][where] = values
    assert not any(np.isnan(v).any() for v in whole.values())
    return whole


def count_calls_of_a_step(
    rank: int, world: int, port: int, folder: str, name: str, options: dict[str, Any]
) -> dict[str, int]:
    """How often each op ran forward during one training step."""
    trainer = _trainer(rank, world, port, name, (1, 1, 1), options)
    try:
        trainer.initialize()
        trainer.load(folder)
        batch = batch_for(name)
        old = trainer.score(batch, TEMPERATURE)
        readback.reset_calls()
        trainer.train(batch, ADVANTAGES, old, TEMPERATURE)
        return trainer.readback()["op_calls"]
    finally:
        trainer.shutdown()


def step_export_and_score(
    rank: int, world: int, port: int, folder: str, name: str, layout: Layout, saved: str
) -> dict[str, Any]:
    """One step, then the weights as Hugging Face tensors, saved too, and the next score."""
    trainer = _trainer(rank, world, port, name, layout, {"lr": 0.02})
    try:
        trainer.initialize()
        trainer.load(folder)
        batch = batch_for(name)
        trainer.train(batch, ADVANTAGES, trainer.score(batch, TEMPERATURE), TEMPERATURE)
        trainer.save_hf(saved)
        export = [(k, v.view(torch.int16).numpy()) for k, v in trainer.export_weights()]
        return {
            "export": export,
            "scores": trainer.score(batch, TEMPERATURE),
            "digest": trainer.weights_digest(),
            "saved_digest": hf_folder_digest(Path(saved), trainer.shape) if rank == 0 else None,
        }
    finally:
        trainer.shutdown()
