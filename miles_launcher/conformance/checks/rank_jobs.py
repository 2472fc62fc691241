"""What each real rank computes, and what the oracle expects of every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ..context import Context, array
from ..oracle import products
from ..oracle import rows as oracle
from ..oracle.numbers import Array
from .log_softmax import logits_of, segments_of
from .row_linear_cases import V1, V2, Case, operands
from .tree_all_reduce import part

Job = Callable[[Context, Any], dict[str, torch.Tensor]]
Expected = Callable[[Context, int], dict[str, Array]]
_VOCABULARY = 300
_DTYPES = (torch.bfloat16, torch.float32)


def _cases(contract: str, size: int) -> dict[str, Case]:
    """v1: whole tiles; twice the ranks on the rollout's side, which puts the bias inside a rank; a
    rank's K that is no multiple of a tile. v2: eight segments."""
    if contract == V2:
        return {"S 8": Case(V2, 1024), "odd S 8": Case(V2, 8 * 76)}
    return {
        "tiles": Case(V1, 24 * 128, size),
        "finer rollout": Case(V1, 24 * 128, min(8, 2 * size)),
        "rollout partition": Case(V1, 448 * size, size),
    }


def _sized(ctx: Context, contract: str, size: int) -> Iterator[tuple[str, Case, int]]:
    """The cases with few rows; on GPUs one of v2's also with many, whose sum takes another form."""
    cases = _cases(contract, size)
    for name, case in cases.items():
        yield f"{name}, 5 rows", case, 5
    if ctx.target == "cuda" and contract == V2:
        name, case = next(iter(cases.items()))
        yield f"{name}, 300 rows", case, 300


def _row_linear(contract: str) -> tuple[Job, Expected]:
    def job(ctx: Context, ranks: Any) -> dict[str, torch.Tensor]:
        out = {}
        for name, case, rows in _sized(ctx, contract, ranks.size):
            x, weight, bias = operands(ctx, case, rows)
            mine = [t.chunk(ranks.size, 1)[ranks.rank] for t in (x, weight)]
            for label, b in (("", None), (", bias", bias)):
                moved = [*ctx.put(*mine), None if b is None else b.to(ctx.device)]
                out[name + label] = ctx.subject.row_linear(
                    *moved, reduction=case.reduction(), ranks=ranks
                )
        return out

    def expected(ctx: Context, size: int) -> dict[str, Array]:
        out = {}
        for name, case, rows in _sized(ctx, contract, size):
            x, weight, bias = operands(ctx, case, rows)
            out[name] = case.oracle(x, weight, None)
            out[name + ", bias"] = case.oracle(x, weight, bias)
            if size > 2:
                # Ranks 1 and 2 change places: two ranks alone could not show it (a + b = b + a).
                order = [0, 2, 1, *range(3, size)]
                swapped = [torch.cat([t.chunk(size, 1)[i] for i in order], 1) for t in (x, weight)]
                other = case.oracle(swapped[0], swapped[1], None)
                ctx.shows(out[name], other, f"{name} over {size} ranks: two ranks swapped")
        return out

    return job, expected


# Rows of the ranks' messages: one shot, and two in pieces, where a rank's areas are as small as
# real ranks of this suite have them.
_MESSAGES = (33, 3001)


def _tree_job(ctx: Context, ranks: Any) -> dict[str, torch.Tensor]:
    out = {}
    for dtype in _DTYPES:
        for rows in _MESSAGES:
            (mine,) = ctx.put(part(ranks.rank, dtype, rows))
            out[f"{dtype}, {rows} rows"] = ctx.subject.tree_all_reduce(mine, ranks)
            kept = ctx.subject.tree_reduce_scatter(mine, ranks)
            # Every rank is judged by all rows, so they are gathered; no arithmetic.
            whole = torch.cat(ctx.subject.gather_ranks(kept, ranks))
            out[f"{dtype}, {rows} rows, scattered"] = whole
    return out


def _tree_expected(ctx: Context, size: int) -> dict[str, Array]:
    out = {}
    for dtype in _DTYPES:
        for rows in _MESSAGES:
            arrays = [array(part(rank, dtype, rows)) for rank in range(size)]
            name, label = str(dtype).removeprefix("torch."), f"{dtype}, {rows} rows"
            out[label] = products.tree(arrays, name)
            missing = np.zeros((-rows % size, arrays[0].shape[1]), np.float32)
            out[f"{label}, scattered"] = np.concatenate([out[label], missing])
            if size > 2:
                chain = products.chain(arrays, name)
                ctx.shows(out[label], chain, f"{size} ranks, {label}: a chain")
    return out


def _softmax_job(ctx: Context, ranks: Any) -> dict[str, torch.Tensor]:
    segments, width, count = segments_of(V2, _VOCABULARY)
    (logits,) = ctx.put(logits_of(5, _VOCABULARY, width * count))
    each = count // ranks.size
    mine = logits.chunk(ranks.size, 1)[ranks.rank]
    statistics = ctx.subject.segment_statistics(mine, segments, ranks.rank * each, each)
    gathered = [torch.cat(ctx.subject.gather_ranks(x, ranks), -1) for x in statistics]
    return {"normaliser": ctx.subject.combine_segments(*gathered)}


def _softmax_expected(ctx: Context, size: int) -> dict[str, Array]:
    _, width, count = segments_of(V2, _VOCABULARY)
    logits = array(logits_of(5, _VOCABULARY, width * count))
    statistics = oracle.statistics(logits, _VOCABULARY, width, count, ctx.exp)
    return {"normaliser": oracle.combined(*statistics, ctx.exp, ctx.log)}


RANK_JOBS: Mapping[str, tuple[Job, Expected]] = MappingProxyType(
    {
        "row_linear_v1": _row_linear(V1),
        "row_linear_v2": _row_linear(V2),
        "tree_all_reduce": (_tree_job, _tree_expected),
        "log_softmax": (_softmax_job, _softmax_expected),
    }
)
