"""Segment statistics and their combination: from logits to logprobs, entropy and gradient."""

from __future__ import annotations

import torch

from ..bits import random
from ..context import Context, array
from ..oracle import rows as oracle
from ..oracle.numbers import running_sum
from ..subject import VocabularySegments, vocabulary_segments
from . import token_logprobs
from .common import OpSuite, borders, neighbours, repeated
from .row_linear_cases import V1, V2

FP32 = torch.float32


def segments_of(contract: str, vocab_size: int) -> tuple[VocabularySegments, int, int]:
    """(what the op is told, width and number of segments as worked out here)."""
    width = vocab_size if contract == V1 else oracle.segment_width(vocab_size)
    return vocabulary_segments(contract, vocab_size), width, 1 if contract == V1 else 8


def logits_of(rows: int, vocab_size: int, padded: int) -> torch.Tensor:
    """Random logits; the padding is larger than any, so that it would show."""
    logits = random(rows, max(padded, vocab_size), seed=91, dtype=FP32, scale=3.0)
    logits[:, vocab_size:] = 1e4
    return logits


def _layouts(ctx: Context) -> list[tuple[str, int]]:
    return [(contract, size) for size in ctx.setting.vocabularies for contract in (V1, V2)]


def order(ctx: Context) -> str:
    for contract, vocab_size in _layouts(ctx):
        label = f"{contract[-2:]}, vocabulary {vocab_size}"
        segments, width, count = segments_of(contract, vocab_size)
        logits = logits_of(5, vocab_size, width * count)
        (there,) = ctx.put(logits)
        found = ctx.subject.segment_statistics(there, segments, 0, count)
        wanted = oracle.statistics(array(logits), vocab_size, width, count, ctx.exp)
        ctx.equal(found[0], wanted[0], f"{label}: maxima")
        ctx.equal(found[1], wanted[1], f"{label}: sums")
        normaliser = oracle.combined(*wanted, ctx.exp, ctx.log)
        ctx.equal(ctx.subject.combine_segments(*found), normaliser, f"{label}: normaliser")
        real = array(logits)[:, :vocab_size]
        logprobs = ctx.subject.log_softmax(there, segments)
        ctx.equal(logprobs, real - normaliser[:, None], f"{label}: logprobs")
        token_logprobs.order(ctx, label, logits, segments, width, count)
        # One running sum over the first segment, and the padding let in.
        first = real[:, :width]
        running = running_sum(ctx.exp(first - first.max(1, keepdims=True)))
        ctx.shows(wanted[1][:, 0], running, f"{label}: a running sum")
        if width * count > vocab_size:
            padded = oracle.statistics(array(logits), width * count, width, count, ctx.exp)
            ctx.shows(normaliser, oracle.combined(*padded, ctx.exp, ctx.log), f"{label}: padding")
    _combination(ctx)
    return f"vocabularies {ctx.setting.vocabularies}, one and eight segments; padding stays out"


def _combination(ctx: Context) -> None:
    """The tree over eight segments, on rows enough to tell it from a chain: the logarithm and the
    maximum before it hide most of the last bit of the sum."""
    largest = random(2000, 8, seed=92, dtype=FP32)
    total = 1.0 + 19.0 * random(2000, 8, seed=93, dtype=FP32).abs()
    a, b = array(largest), array(total)
    wanted = oracle.combined(a, b, ctx.exp, ctx.log)
    ctx.equal(ctx.subject.combine_segments(*ctx.put(largest, total)), wanted, "2000 rows combined")
    overall = a.max(axis=1)
    chain = overall + ctx.log(running_sum(b * ctx.exp(a - overall[:, None])))
    ctx.shows(wanted, chain, "segments in a chain")


def value(ctx: Context) -> str:
    worst = 0.0
    for contract, vocab_size in _layouts(ctx):
        segments, width, count = segments_of(contract, vocab_size)
        logits = logits_of(3, vocab_size, width * count)
        real = logits[:, :vocab_size].double()
        exact = real.log_softmax(-1)
        # Exponent and its argument, the tree's levels, the logarithm and two subtractions: a few
        # units of the spread of the logits and of the result.
        spread = real.amax(-1, keepdim=True) - real.amin(-1, keepdim=True)
        bound = 2.0**-22 * (spread + exact.abs())
        out = ctx.subject.log_softmax(*ctx.put(logits), segments)
        label = f"{contract[-2:]}, {vocab_size}"
        worst = max(worst, ctx.near(out, exact, bound, label))
        worst = max(worst, token_logprobs.value(ctx, logits, segments, label))
    return f"at most {worst:.2f} of 2^-22 (spread + |logprob|), entropy of 2^-21 (1 + spread)"


def dtypes(ctx: Context) -> str:
    segments, width, count = segments_of(V2, 300)
    (logits,) = ctx.put(logits_of(3, 300, width * count))
    out = ctx.subject.log_softmax(logits, segments)
    ctx.require(out.dtype == FP32 and out.shape == (3, 300), f"{out.dtype} {tuple(out.shape)}")
    statistics = ctx.subject.segment_statistics
    ctx.refused(lambda: statistics(logits.bfloat16(), segments, 0, 8), "bf16 logits")
    ctx.refused(lambda: statistics(logits[:, :200], segments, 0, 8), "missing columns")
    token_logprobs.refusals(ctx, segments, logits)
    return "fp32; bf16 logits, missing columns, other targets refused"


def shapes(ctx: Context) -> str:
    rows, vocabularies = max(ctx.setting.rows), ctx.setting.odd_vocabularies
    for vocab_size in vocabularies:
        segments, width, count = segments_of(V2, vocab_size)
        logits = logits_of(rows, vocab_size, width * count)
        wanted = oracle.statistics(array(logits), vocab_size, width, count, ctx.exp)
        normaliser = oracle.combined(*wanted, ctx.exp, ctx.log)[:, None]

        def run(part: torch.Tensor, segments: VocabularySegments = segments) -> torch.Tensor:
            out: torch.Tensor = ctx.subject.log_softmax(part, segments)
            return out

        (there,) = ctx.put(logits)
        expected = array(logits)[:, :vocab_size] - normaliser
        ctx.equal(run(there), expected, f"vocabulary {vocab_size}")
        (cut,) = ctx.put(logits[:, :vocab_size])
        ctx.equal(run(cut), expected, f"vocabulary {vocab_size}, no padding given")
        ctx.equal(run(there.t().contiguous().t()), expected, f"vocabulary {vocab_size}, strides")
        ctx.require(run(there[:0]).shape == (0, vocab_size), "no rows")
    borders(ctx, run, [there], f"{vocab_size} columns")
    return f"rows {ctx.setting.rows}, vocabularies {vocabularies}, empty segments, strides, no rows"


def beside(ctx: Context) -> str:
    segments, width, count = segments_of(V2, 300)
    logits = ctx.put(logits_of(max(ctx.setting.rows), 300, width * count))
    return neighbours(ctx, lambda x: ctx.subject.log_softmax(x, segments), logits, "log_softmax")


def tp_shards(ctx: Context) -> str:
    for vocab_size in ctx.setting.vocabularies:
        segments, width, count = segments_of(V2, vocab_size)
        (logits,) = ctx.put(logits_of(3, vocab_size, width * count))
        expected = oracle.combined(
            *oracle.statistics(array(logits), vocab_size, width, count, ctx.exp), ctx.exp, ctx.log
        )
        for tp in ctx.setting.tp:
            each = count // tp
            parts = [
                ctx.subject.segment_statistics(shard, segments, rank * each, each)
                for rank, shard in enumerate(logits.chunk(tp, 1))
            ]
            gathered = [torch.cat(side, 1) for side in zip(*parts, strict=True)]
            out = ctx.subject.combine_segments(*gathered)
            ctx.equal(out, expected, f"vocabulary {vocab_size} over {tp} ranks")
        token_logprobs.tp_shards(ctx, logits, segments, count, f"vocabulary {vocab_size}")
    ctx.degrees = ctx.setting.tp
    return f"eight segments over {ctx.setting.tp}, the last ones empty or short"


def cpu_bits(ctx: Context) -> str:
    for contract, vocab_size in _layouts(ctx):
        segments, width, count = segments_of(contract, vocab_size)
        logits = logits_of(9, vocab_size, width * count)
        out = ctx.subject.log_softmax(*ctx.put(logits), segments)
        ctx.equal(out, ctx.reference.log_softmax(logits, segments), f"vocabulary {vocab_size}")
    return f"vocabularies {ctx.setting.vocabularies}, one and eight segments"


def run_to_run(ctx: Context) -> str:
    segments, width, count = segments_of(V2, ctx.setting.vocabularies[-1])
    logits = ctx.put(logits_of(min(9, ctx.setting.repeat_rows), segments.vocab_size, width * count))
    repeated(ctx, lambda: ctx.subject.log_softmax(*logits, segments), "log_softmax")
    return "four calls"


SUITE = OpSuite(
    name="log_softmax",
    checks={
        "order": order,
        "value": value,
        "dtypes": dtypes,
        "shapes": shapes,
        "neighbours": beside,
        "tp_shards": tp_shards,
        "cpu_bits": cpu_bits,
        "run_to_run": run_to_run,
    },
    absent={
        "phases": "a row has no phase here; see neighbours",
        "split_k": "there is no K; segments are the contract's",
        "kernel_table": "one launch for every size",
    },
    fault=(
        ("segment_statistics", "order"),
        ("combine_segments", "order"),
        ("log_softmax", "order"),
        ("token_statistics", "order"),
        ("combine_entropy", "order"),
        ("logits_gradient", "order"),
    ),
)
