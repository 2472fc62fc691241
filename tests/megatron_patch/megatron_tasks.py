"""What the rank processes run. Every task takes (rank, world, port, ...) and returns plain data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron_models import ADVANTAGES, SHAPES, TEMPERATURE, batch_for
from megatron_ranks import free_port

from megatron_patch import autograd, readback
from megatron_patch.checkpoint import hf_folder_digest, this_place
from megatron_patch.hf_layout import blocks, hf_tensors
from megatron_patch.ops import RankGroup
from megatron_patch.ops.tree_all_reduce.reference import sum_ranks
from megatron_patch.parallel import (
    gather_partial,
    gather_replicated,
    gather_rows,
    heads_to_sequence,
    pack,
    reduce_scatter_rows,
    sequence_to_heads,
)
from megatron_patch.parallel.ulysses import replicate_heads
from miles_launcher.runtime.trainer_rank import Batch, TrainerRank, TrainerRankConfig

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


def tapped_scores(
    rank: int,
    world: int,
    port: int,
    folder: str,
    name: str,
    layout: Layout,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Score without taps and with them."""
    trainer = _trainer(rank, world, port, name, layout, options)
    try:
        trainer.initialize()
        trainer.load(folder)
        batch = batch_for(name)
        plain = trainer.score(batch, TEMPERATURE)
        trainer.start_taps()
        tapped = trainer.score(batch, TEMPERATURE)
        return {"plain": plain, "tapped": tapped, **trainer.finish_taps()}
    finally:
        trainer.shutdown()


def whole_gradients(results: list[dict[str, Any]], name: str) -> dict[str, np.ndarray]:
    """Put the ranks' shares together (context-parallel replicas overwrite each other)."""
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


def load_and_save(
    rank: int, world: int, port: int, folder: str, name: str, layout: Layout, saved: str
) -> dict[str, Any]:
    """Load, save unchanged, and try to save over it."""
    trainer = _trainer(rank, world, port, name, layout, {})
    try:
        trainer.initialize()
        trainer.load(folder)
        trainer.save_hf(saved)
        return {
            "digest": trainer.weights_digest(),
            "second_save": _message(lambda: trainer.save_hf(saved)),
        }
    finally:
        trainer.shutdown()


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("no ValueError was raised")


def load_error(rank: int, world: int, port: int, folder: str, name: str) -> str:
    trainer = _trainer(rank, world, port, name, (1, 1, 1), {})
    try:
        trainer.initialize()
        return _message(lambda: trainer.load(folder))
    finally:
        trainer.shutdown()


def trainer_errors(rank: int, world: int, port: int, folder: str, name: str) -> dict[str, str]:
    """The messages of wrong calls, on one rank."""
    found = {}
    trainer = _trainer(rank, world, port, name, (1, 1, 1), {})
    batch = Batch(tokens=[[1, 2], [3, 4, 5]], prompt_lengths=[1, 1], response_lengths=[1, 2])
    one, two = np.zeros(1, np.float32), np.zeros(2, np.float32)
    try:
        trainer.initialize()
        found["not loaded"] = _message(lambda: trainer.score(batch, 1.0))
        trainer.load(folder)
        empty = Batch(tokens=[[1]], prompt_lengths=[1], response_lengths=[0])
        nothing = [np.zeros(0, np.float32)]
        found["nothing to learn"] = _message(lambda: trainer.train(empty, [1.0], nothing, 1.0))
        found["lengths"] = _message(lambda: trainer.train(batch, [1.0, 1.0], [one, one], 1.0))
        found["nan"] = _message(lambda: trainer.train(batch, [1.0, np.nan], [one, two], 1.0))
    finally:
        trainer.shutdown()
    for key, options in (("megatron", {"megatron": {"num_layers": 9}}),):
        trainer = _trainer(rank, world, free_port(), name, (1, 1, 1), options)
        try:
            found[key] = _message(trainer.initialize)
        finally:
            trainer.shutdown()
    trainer = _trainer(rank, world, free_port(), name, (1, 1, 1), {"contract": "off"})
    with (
        mock.patch.object(parallel_state, "get_context_parallel_world_size", return_value=2),
        contextlib.ExitStack() as stack,
    ):
        stack.callback(trainer.shutdown)
        found["off with cp"] = _message(trainer.initialize)
    return found


def ulysses_against_whole(
    rank: int, world: int, port: int, lengths: list[int], heads: int, kv_heads: int
) -> dict[str, Any]:
    """Attention over context-parallel ranks against the same op on whole sequences."""
    with _process_group(rank, world, port) as ranks:
        generator = torch.Generator().manual_seed(1)
        total, dim = sum(lengths), 16

        def random(count: int) -> torch.Tensor:
            return torch.randn((total, count, dim), generator=generator).bfloat16()

        query, key, value, out_gradient = (random(n) for n in (heads, kv_heads, kv_heads, heads))
        whole = [x.clone().requires_grad_() for x in (query, key, value)]
        expected = autograd.attention(*whole, lengths=lengths, scale=0.25)
        expected.backward(out_gradient)
        sequences = [[0] * n for n in lengths]
        batch = pack(
            sequences,
            lengths,
            temperature=1.0,
            device=torch.device("cpu"),
            cp_size=world,
            cp_rank=rank,
        )
        tokens = batch.tokens.shape[0]
        slots = batch.natural - rank * tokens
        mine = ((slots >= 0) & (slots < tokens)).nonzero().view(-1)
        here = slots[mine]

        def local(x: torch.Tensor) -> torch.Tensor:
            part = torch.zeros((tokens, *x.shape[1:]), dtype=x.dtype)
            part[here] = x.detach()[mine]
            return part

        parts = [local(x).requires_grad_() for x in (query, key, value)]
        spread = [
            sequence_to_heads(x if i == 0 else replicate_heads(x, ranks), batch.natural, ranks)
            for i, x in enumerate(parts)
        ]
        out = autograd.attention(*spread, lengths=lengths, scale=0.25)
        out = heads_to_sequence(out, batch.natural, tokens, ranks)
        out.backward(local(out_gradient))
        errors = [
            float((a.grad[here].float() - b.grad[mine].float()).abs().max() / b.grad.abs().max())
            for a, b in zip(parts[1:], whole[1:], strict=True)
        ]
        rest = torch.ones(tokens, dtype=torch.bool)
        rest[here] = False
        return {
            "equal": torch.equal(out[here].view(torch.int16), expected[mine].view(torch.int16)),
            "padding_is_zero": not out[rest].abs().sum() and not parts[0].grad[rest].abs().sum(),
            "query_gradient_equal": torch.equal(parts[0].grad[here], whole[0].grad[mine]),
            "key_gradient_error": max(errors),
        }


def gathers(rank: int, world: int, port: int) -> dict[str, bool]:
    """Forward and gradient of both gathers of the last dimension."""
    with _process_group(rank, world, port) as ranks:
        generator = torch.Generator().manual_seed(2)
        everyone = torch.randn((world, 5, 3), generator=generator)
        gradients = torch.randn((world, 5, 3 * world), generator=generator).mul_(1e3)
        x = everyone[rank].clone().requires_grad_()
        out = gather_replicated(x, ranks)
        forward = torch.equal(out, torch.cat(list(everyone), dim=-1))
        out.backward(gradients[0])
        own = slice(3 * rank, 3 * rank + 3)
        replicated = torch.equal(x.grad, gradients[0][:, own])
        y = everyone[rank].clone().requires_grad_()
        gather_partial(y, ranks).backward(gradients[rank])
        total = sum_ranks(list(gradients))[:, own]
        left_to_right = gradients[0]
        for other in gradients[1:]:
            left_to_right = left_to_right + other
        return {
            "forward": forward,
            "replicated_is_own_slice": replicated,
            "partial_is_the_sum": torch.equal(y.grad, total),
            # Two ranks cannot show an order: a + b = b + a.
            "order_shows": world == 2 or not torch.equal(left_to_right[:, own], total),
        }


def row_scatter(rank: int, world: int, port: int) -> dict[str, bool]:
    """Rows summed and kept, and gathered again, with rows that no rank of the last has."""
    rows, columns, share = 4 * world + 1, 6, 5
    with _process_group(rank, world, port) as ranks:
        generator = torch.Generator().manual_seed(4)
        everyone = torch.randn((world, rows, columns), generator=generator).mul_(1e3)
        gradients = torch.randn((world, share, columns), generator=generator)
        x = everyone[rank].clone().requires_grad_()
        out = reduce_scatter_rows(x, ranks)
        out.backward(gradients[rank])
        missing = torch.zeros((world * share - rows, columns))
        total = sum_ranks(list(everyone))
        own = slice(rank * share, (rank + 1) * share)
        left_to_right = everyone[0]
        for other in everyone[1:]:
            left_to_right = left_to_right + other
        # The way back: each rank uses all rows with a gradient of its own.
        y = total.new_zeros((share, columns)).requires_grad_()
        whole = gather_rows(y, rows, ranks)
        whole.backward(everyone[rank])
        return {
            "forward": torch.equal(out, torch.cat([total, missing])[own]),
            "order_shows": world == 2 or not torch.equal(left_to_right, total),
            "gradient_is_the_owners": torch.equal(x.grad, torch.cat(list(gradients))[:rows]),
            "gathered_gradient_is_the_sum": torch.equal(y.grad, torch.cat([total, missing])[own]),
            "rows": whole.shape[0] == rows,
            "gradcheck": torch.autograd.gradcheck(
                lambda t: gather_rows(reduce_scatter_rows(t, ranks), rows, ranks) / world,
                (everyone[0][:, :2].double().requires_grad_(),),
            ),
        }


@contextlib.contextmanager
def _process_group(rank: int, world: int, port: int) -> Iterator[RankGroup]:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    try:
        yield RankGroup.of(dist.group.WORLD)
    finally:
        dist.destroy_process_group()
