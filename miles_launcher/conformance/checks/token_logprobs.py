"""What the trainer's head makes of logits: statistics with temperature, targets and entropy in one
launch, and the gradient. Part of the claims of `log_softmax`."""

from __future__ import annotations

import numpy as np
import torch

from ..bits import random
from ..context import Context, array
from ..oracle import rows as oracle
from ..oracle.numbers import Array, bf16, running_sum
from ..subject import VocabularySegments

BF16, FP32 = torch.bfloat16, torch.float32


def temperatures(rows: int) -> list[torch.Tensor]:
    """One for all rows, the one that divides nothing, and one a row with a 1 among them."""
    each = 0.3 + random(rows, 1, seed=98, dtype=FP32).abs()
    each[0] = 1.0
    return [torch.tensor(0.7), torch.tensor(1.0), each]


def _targets(rows: int, vocab_size: int) -> torch.Tensor:
    """Token ids, the first and the last of the vocabulary among them."""
    chosen = torch.randint(vocab_size, (rows,), generator=torch.Generator().manual_seed(99))
    chosen[0], chosen[-1] = 0, vocab_size - 1
    return chosen


def order(
    ctx: Context,
    label: str,
    logits: torch.Tensor,
    segments: VocabularySegments,
    width: int,
    count: int,
) -> None:
    """One launch against division, maxima, sums and choice one after the other."""
    rows, vocab_size = logits.shape[0], segments.vocab_size
    targets = _targets(rows, vocab_size)
    for temperature in temperatures(rows):
        scaled = array(logits) / array(temperature)
        found = ctx.subject.token_statistics(
            *ctx.put(logits, temperature, targets), segments, 0, count, entropy=True
        )
        wanted = (
            *oracle.statistics(scaled, vocab_size, width, count, ctx.exp),
            _chosen(scaled, targets.numpy(), width, count),
            oracle.weighted(scaled, vocab_size, width, count, ctx.exp),
        )
        names = ("maxima", "sums", "targets", "weighted sums")
        for name, here, there in zip(names, found, wanted, strict=True):
            ctx.equal(here, there, f"{label}: {name} at a temperature")
        first = scaled[:, : min(width, vocab_size)]
        distance = first - first.max(1, keepdims=True)
        if first.shape[1] > 64:
            ctx.shows(wanted[3][:, 0], running_sum(ctx.exp(distance) * distance), f"{label}: chain")
        largest, total, _, weighted = wanted
        entropy = oracle.entropy(largest, total, weighted, ctx.exp, ctx.log)
        here = ctx.subject.combine_entropy(found[0], found[1], found[3])
        ctx.equal(here, entropy, f"{label}: entropy")
        normaliser = oracle.combined(largest, total, ctx.exp, ctx.log)
        logprobs = ctx.subject.log_softmax(*ctx.put(logits), segments, *ctx.put(temperature))
        ctx.equal(logprobs, scaled[:, :vocab_size] - normaliser[:, None], f"{label}: logprobs")
        _gradient(ctx, label, logits, temperature, targets, normaliser, vocab_size)


def _chosen(scaled: Array, targets: Array, width: int, count: int) -> Array:
    """The target's scaled logit in its segment, 0 in the others."""
    rows = np.arange(len(targets))
    out = np.zeros((len(targets), count), dtype=np.float32)
    out[rows, targets // width] = scaled[rows, targets]
    return out


def _gradient(
    ctx: Context,
    label: str,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    targets: torch.Tensor,
    normaliser: Array,
    vocab_size: int,
) -> None:
    gradient = random(logits.shape[0], seed=97, dtype=FP32)
    weight = array(gradient) / array(temperature).reshape(-1)
    scaled = array(logits) / array(temperature)
    wanted = oracle.logits_gradient(
        scaled, targets.numpy(), normaliser, weight, vocab_size, ctx.exp
    )
    operands = ctx.put(logits, temperature, targets, torch.from_numpy(normaliser), gradient)
    middle = vocab_size // 2
    for dtype, expected in ((FP32, wanted), (BF16, bf16(wanted))):

        def run(start: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            out: torch.Tensor = ctx.subject.logits_gradient(
                operands[0][:, start:],
                *operands[1:],
                first_column=start,
                vocab_size=vocab_size,
                out_dtype=dtype,
            )
            return out

        ctx.equal(run(0), expected, f"{label}: gradient in {dtype}")
        ctx.equal(run(middle), expected[:, middle:], f"{label}: gradient of a shard in {dtype}")
    ctx.shows(bf16(wanted), bf16(bf16(wanted - _hit(wanted, targets, weight))), f"{label}: target")


def _hit(wanted: Array, targets: torch.Tensor, weight: Array) -> Array:
    out = np.zeros_like(wanted)
    out[np.arange(len(weight)), targets.numpy()] = weight
    return out


def value(ctx: Context, logits: torch.Tensor, segments: VocabularySegments, label: str) -> float:
    """The entropy against fp64, within the roundings of exponents, sums and the mean."""
    real = logits[:, : segments.vocab_size].double() / 0.7
    p = real.softmax(-1)
    exact = -(p * real.log_softmax(-1)).sum(-1)
    temperature = torch.tensor(0.7)
    found = ctx.subject.token_statistics(
        *ctx.put(logits, temperature, _targets(len(logits), segments.vocab_size)),
        segments,
        0,
        segments.num_segments,
        entropy=True,
    )
    out = ctx.subject.combine_entropy(found[0], found[1], found[3])
    spread = real.amax(-1) - real.amin(-1)
    return ctx.near(out, exact, 2.0**-21 * (1.0 + spread), f"{label}: entropy")


def tp_shards(
    ctx: Context, logits: torch.Tensor, segments: VocabularySegments, count: int, label: str
) -> None:
    """Every degree's shards give the statistics of the whole row."""
    targets = _targets(len(logits), segments.vocab_size)
    temperature, there = ctx.put(torch.tensor(0.7), targets)
    run = ctx.subject.token_statistics
    whole = run(logits, temperature, there, segments, 0, count, entropy=True)
    for tp in ctx.setting.tp:
        each = count // tp
        parts = [
            run(shard, temperature, there, segments, rank * each, each, entropy=True)
            for rank, shard in enumerate(logits.chunk(tp, 1))
        ]
        for one, all_ranks in zip(whole, zip(*parts, strict=True), strict=True):
            ctx.equal(torch.cat(all_ranks, 1), one.cpu(), f"{label} over {tp} ranks")


def refusals(ctx: Context, segments: VocabularySegments, logits: torch.Tensor) -> None:
    """Arguments that would be another number, or none."""
    targets = ctx.put(torch.zeros(len(logits), dtype=torch.int64))[0]
    statistics = ctx.subject.token_statistics
    one = ctx.put(torch.tensor(1.0))[0]
    ctx.refused(lambda: statistics(logits.bfloat16(), None, targets, segments, 0, 8), "bf16")
    ctx.refused(lambda: statistics(logits, one, targets.int(), segments, 0, 8), "int32 targets")
    ctx.refused(lambda: statistics(logits[:, :200], one, targets, segments, 0, 8), "few columns")
    numbers = logits[:, 0].contiguous()
    gradient = ctx.subject.logits_gradient
    ctx.refused(
        lambda: gradient(
            logits,
            one,
            targets,
            numbers[:1],
            numbers,
            first_column=0,
            vocab_size=300,
            out_dtype=BF16,
        ),
        "one normaliser for all rows",
    )
