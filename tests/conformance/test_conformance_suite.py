"""The suite on this CPU, at small size, real ranks included; and the oracle's independence."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from miles_launcher.conformance import oracle
from miles_launcher.conformance.bits import random
from miles_launcher.conformance.certificate import OP_NAMES
from miles_launcher.conformance.checks import OPS
from miles_launcher.conformance.oracle import products
from miles_launcher.conformance.oracle.numbers import bf16, pair_tree
from miles_launcher.conformance.properties import PROPERTIES, Result, Status
from miles_launcher.conformance.setting import CPU, CUDA, SMALL
from miles_launcher.conformance.suite import run_suite, select


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return list(run_suite(select([]), target="cpu", setting=SMALL))


def test_nothing_fails_and_everything_applicable_is_shown(results: list[Result]) -> None:
    bad = [r for r in results if r.status in (Status.FAILED, Status.NOT_SHOWN)]
    assert not bad, "\n".join(f"{r.op} {r.property}: {r.detail}" for r in bad)
    assert {(r.op, r.property) for r in results} == {(o, p) for o in OPS for p in PROPERTIES}
    shown = [r for r in results if r.status is Status.OK]
    assert len(shown) > 100 and all(r.compared > 0 for r in shown)
    assert all(r.detail for r in results)


def test_real_ranks_of_degree_four_ran(results: list[Result]) -> None:
    ran = {r.op: r.degrees for r in results if r.property == "tp_ranks" and r.status is Status.OK}
    assert ran.keys() == {"row_linear_v1", "row_linear_v2", "tree_all_reduce", "log_softmax"}
    assert set(ran.values()) == {(2, 4)}


def test_full_size_is_the_specification_s() -> None:
    for setting in (CPU, CUDA):
        assert setting.rows == (1, 16, 63, 64, 65, 127, 128, 129, 255, 256, 257)
        assert setting.tiles == (1, 2, 3, 6, 7, 19, 24, 37, 38, 76, 100, 148)
        assert setting.tp == (1, 2, 4, 8) and setting.ranks == (2, 4, 8)
        assert setting.name == "full" and SMALL.name != "full"


def test_unknown_ops_list_the_close_ones() -> None:
    assert select(["rope", "linear"]) == ("linear", "rope") and select([]) == OP_NAMES
    with pytest.raises(ValueError, match="did you mean row_linear_v2 or row_linear_v1"):
        select(["row_linear_v3"])
    with pytest.raises(ValueError, match="unknown op 'zzz'; the ops are elementary, "):
        select(["zzz"])


def test_the_oracle_shares_no_code_with_what_it_judges() -> None:
    folder = Path(oracle.__file__).parent
    found = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level <= 1, f"{path.name}: reaches out of the oracle"
                found |= {node.module} if node.level == 0 and node.module else set()
    assert {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names) == {"numpy"}


# The specification's table, written out.
FIRST = {4: 2, 6: 3, 8: 2, 12: 3, 16: 2, 19: 19, 24: 3, 32: 2, 38: 19, 40: 5, 48: 3, 64: 2, 76: 19}


def test_the_oracle_has_the_specification_s_runs() -> None:
    assert {tiles: products.first_of(tiles) for tiles in FIRST} == FIRST


def test_the_oracle_s_formats_and_sums_by_hand() -> None:
    x = random(4096, seed=1, dtype=torch.float32)
    tie = torch.tensor([1.00390625, 1.01171875, -1.00390625, float("inf"), -0.0, 3.4e38])
    for numbers in (x, tie):
        wanted = numbers.to(torch.bfloat16).float().numpy()
        assert np.array_equal(bf16(numbers.numpy()).view(np.int32), wanted.view(np.int32))
    big = np.array([[2.0**24, 1.0, 1.0, 1.0, -(2.0**24)]], dtype=np.float32)
    # (2^24 + 1) + (1 + 1) = 2^24 + 2, as the first sum rounds to even; then the odd one out.
    assert pair_tree(big).tolist() == [2.0]
    parts = [np.float32([v]) for v in (2.0**24, 1.0, 1.0, 1.0)]
    assert products.tree(parts, "float32").tolist() == [2.0**24 + 2]
    assert products.chain(parts, "float32").tolist() == [2.0**24]


def test_a_plain_tree_is_another_number_where_the_specification_says_so() -> None:
    for tiles in (6, 7, 19, 24, 38):
        parts = [bf16(random(9, 5, seed=s, dtype=torch.float32).numpy()) for s in range(tiles)]
        published = products.runs_then_tree(parts, "bfloat16")
        assert not np.array_equal(published, products.plain_tree(parts, "bfloat16")), tiles
    for tiles in (2, 3, 4, 8, 16):
        parts = [bf16(random(9, 5, seed=s, dtype=torch.float32).numpy()) for s in range(tiles)]
        published = products.runs_then_tree(parts, "bfloat16")
        assert np.array_equal(published, products.plain_tree(parts, "bfloat16")), tiles
