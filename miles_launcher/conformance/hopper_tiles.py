"""Contract v1's entries on Hopper: each one gives the written order's bits. Imports Triton."""

from __future__ import annotations

import torch

from sglang_patch import ops
from sglang_patch.ops.linear.table import FEW_ROWS, FewTile, PersistentTile, Plan, plan_for
from sglang_patch.ops.row_linear.kernel import TILES, launch_row_linear_partial
from sglang_patch.ops.row_linear.table import (
    FEW,
    LEAF_WIDTH,
    PERSISTENT,
    FewPlan,
    admitted_parts,
    choose,
)

from .bf16_sums import compare_sums
from .bits import differing, exact_leaves, one_ulp, random, small_integers
from .context import array
from .hopper import over_processes
from .oracle import products
from .oracle.numbers import bf16

BF16 = torch.bfloat16
# (tile or None for the table's choice, tiles of K, parts, only the last wave in parts).
Case = tuple[FewTile | PersistentTile | None, int, int, bool]
# (tiles of K, parts, only the last wave): no tree, trees of three and five levels, cut ones.
_TREES = (
    (19, 1, False), (24, 1, False), (96, 1, False), (76, 2, False), (32, 2, True), (24, 4, False),
)  # fmt: skip
# What the public op is asked on the entry that the table chooses.
TILE_NUMBERS = (2, 3, 4, 6, 7, 8, 12, 16, 19, 24, 32, 37, 38, 40, 48, 64, 76, 96, 100, 148, 200)
_COLUMNS = 648
_PROCESSORS = (132, 7)


def entries() -> list[Case]:
    """The table's choice for every number of tiles, and each entry with each number of parts."""
    cases: list[Case] = [(None, tiles, 1, False) for tiles in TILE_NUMBERS]
    cases += [
        (few, tiles, parts, False) for few in FEW for tiles, parts, mixed in _TREES if not mixed
    ]
    for tile in PERSISTENT:
        admitted = admitted_parts(tile)
        cases += [(tile, *tree) for tree in _TREES if tree[1:] in admitted]
    return cases


def splits(case: Case) -> bool:
    """Whether the entry gives parts of one product's K to several programs."""
    return case[2] > 1


def _rows(tile: FewTile | PersistentTile | None) -> tuple[int, ...]:
    if tile is None:
        return (1, 16, 64, 129, 600)
    if isinstance(tile, FewTile):
        return (1, 7, FEW_ROWS)
    return (1, 33, 64, 65, 257) if tile.halved else (65, 128, 129, 600)


def _plan(case: Case, rows: int, processors: int) -> FewPlan | Plan | None:
    tile, leaves, parts, mixed = case
    if tile is None:
        return choose(rows, _COLUMNS, leaves, products.first_of(leaves), processors)
    if isinstance(tile, FewTile):
        return FewPlan(tile, parts)
    runs = leaves // products.first_of(leaves)
    return plan_for(tile, rows, _COLUMNS, LEAF_WIDTH, runs, parts, mixed, processors)


def _written(x: torch.Tensor, weight: torch.Tensor, leaves: int) -> torch.Tensor:
    """The oracle's order over leaves whose products are exact."""
    parts = products.leaves(array(x), array(weight), leaves)
    total = products.runs_then_tree([bf16(part) for part in parts], "bfloat16")
    return torch.from_numpy(total).to(BF16)


def compare(case: Case) -> int:
    """Run one entry over rows and processors: on random numbers against the general kernel, on
    exact leaves against the oracle's order. Returns how many outputs were compared.

    Raises `AssertionError` naming the entry where a bit differs, or where inputs show nothing.
    """
    tile, leaves, _, _ = case
    run, k_size, compared = products.first_of(leaves), leaves * LEAF_WIDTH, 0
    most, short = max(_rows(tile)), 8
    x = random(most, k_size, seed=51).cuda()
    weight = random(_COLUMNS, k_size, seed=52).cuda()
    wanted = launch_row_linear_partial(x, weight, leaves, run, BF16, tile=TILES[-1])
    plain = launch_row_linear_partial(x, weight, leaves, leaves, BF16, tile=TILES[-1])
    assert run == leaves or differing(plain, wanted) > 0, f"{case}: the order must show"
    once = launch_row_linear_partial(x, weight, 1, 1, BF16, tile=TILES[-1])
    assert differing(once, wanted) > 0, f"{case}: the leaves' roundings must show"
    exact = exact_leaves(most, k_size, leaves, seed=53)
    integers = small_integers(_COLUMNS, k_size, seed=54)
    written = _written(exact[:short], integers[:64], leaves)
    exact, integers = exact.cuda(), integers.cuda()
    for rows in _rows(tile):
        for processors in _PROCESSORS:
            entry = _plan(case, rows, processors)
            if entry is None:
                continue
            label = f"{case}: {rows} rows, {processors} processors"
            found = launch_row_linear_partial(x[:rows], weight, leaves, run, BF16, tile=entry)
            assert differing(found, wanted[:rows]) == 0, label
            assert differing(one_ulp(found), wanted[:rows]) == 1, label
            # Again: the counters are back at zero. Exact leaves: the order that is written.
            found = launch_row_linear_partial(exact[:rows], integers, leaves, run, BF16, tile=entry)
            found = found[:short, :64].cpu()
            assert differing(found, written[: min(rows, short)]) == 0, label
            compared += 1
    assert compared > 0, f"{case}: fits none of the sizes"
    if tile is None:
        compared += _published(x, weight, wanted)
    return compared


def _published(x: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor) -> int:
    """`matmul_tp_inv` with a bias, on sequences and on rows cut out of wider ones."""
    rows, k_size = x.shape
    bias = random(_COLUMNS, seed=55).cuda()
    expected = (wanted.float() + bias.float()).to(BF16)
    assert differing(wanted, expected) > 0, "the bias must show"
    # Rows that the copy engine reads where they are, and rows that only the general kernel takes.
    for start in (8, 1):
        wide = torch.zeros(rows, k_size + 16, dtype=BF16, device=x.device)
        wide[:, start : start + k_size] = x
        rows_of = wide[:, start : start + k_size].unflatten(0, (2, rows // 2))
        found = ops.matmul_tp_inv(rows_of, weight.t(), bias).flatten(0, 1)
        assert differing(found, expected) == 0, f"K {k_size}, cut out at {start}"
    return 2


def compare_all(chosen: list[Case]) -> int:
    """`compare_sums`, and `compare` for every entry; returns the outputs compared."""
    compare_sums()
    return over_processes(compare, chosen)
