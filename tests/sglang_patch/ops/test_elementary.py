"""exp, log and pair_sum: accuracy, and bits that depend on the values alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from miles_launcher.conformance.bits import differing, one_ulp, random
from sglang_patch.ops.elementary import exp, log, pair_sum, sqrt

FP32, FP64 = torch.float32, torch.float64


def _ulps(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest distance to the fp64 value in units of the last place of the fp32 value."""
    unit = torch.ldexp(torch.ones_like(exact), exact.abs().log2().floor().int() - 23)
    return float(((found.double() - exact) / unit).abs().max())


def test_exp_is_within_two_ulp_and_ends_where_it_says() -> None:
    x = torch.linspace(-87.3, 88.0, 200001)
    assert _ulps(exp(x), x.double().exp()) < 2.0
    edges = torch.tensor([0.0, -0.0, float("-inf"), -88.0, -1e30])
    assert exp(edges).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert exp(torch.tensor([float("nan")])).isnan().all()
    wide = torch.linspace(-700.0, 700.0, 20001, dtype=FP64)
    relative = exp(wide) / wide.exp() - 1
    assert float(relative.abs().max()) < 1e-14


def test_log_is_within_three_ulp() -> None:
    x = torch.cat(
        (torch.logspace(-37, 38, 100001, dtype=FP64).float(), torch.linspace(1, 8, 70001))
    )
    x = x[x != 1.0]
    assert _ulps(log(x), x.double().log()) < 3.0
    assert log(torch.ones(3)).tolist() == [0.0, 0.0, 0.0]
    wide = torch.logspace(-300, 300, 20001, dtype=FP64)
    assert float((log(wide) - wide.log()).abs().max()) < 1e-12


@pytest.mark.parametrize("function", [exp, log])
def test_bits_do_not_depend_on_the_position(function: object) -> None:
    assert callable(function)
    x = random(1000, seed=1, dtype=FP32).abs() + 0.01
    whole = function(x)
    for offset in range(9):
        for length in (1, 2, 3, 5, 8, 15, 16, 17, 33):
            part = function(x[offset : offset + length].clone())
            assert differing(part, whole[offset : offset + length]) == 0
    spread = function(x.view(100, 10).t())
    assert differing(spread.t().contiguous().view(-1), whole) == 0
    assert differing(one_ulp(whole), whole) == 1


@pytest.mark.parametrize("length", [1, 2, 3, 5, 100, 128, 2560])
def test_pair_sum_ignores_padding_and_neighbours(length: int) -> None:
    x = random(5, length, seed=2, dtype=FP32)
    total = pair_sum(x)
    for extra in (1, 7, length):
        padded = torch.nn.functional.pad(x, (0, extra))
        assert differing(pair_sum(padded), total) == 0
    assert differing(pair_sum(x[3:4]), total[3:4]) == 0
    assert differing(pair_sum(x.t(), dim=0), total) == 0
    if length >= 100:
        assert differing(x.cumsum(-1)[:, -1], total) > 0, "the order must show"


def test_pair_sum_is_the_written_tree() -> None:
    a, b, c, d, e = random(5, seed=3, dtype=FP32)
    assert pair_sum(torch.stack((a, b, c, d, e))) == ((a + b) + (c + d)) + e
    assert pair_sum(torch.zeros(3, 0)).tolist() == [0.0, 0.0, 0.0]


def test_square_root_is_correctly_rounded() -> None:
    """Against NumPy's IEEE root, and against exact integers where the root is nearly a tie."""
    generator = torch.Generator().manual_seed(11)
    scale = 10.0 ** torch.randint(-30, 30, (200_000,), generator=generator)
    x = (torch.rand(200_000, generator=generator) * scale).float()
    assert np.array_equal(sqrt(x).numpy(), np.sqrt(x.numpy()))
    for odd in range(2**24 + 1, 2**24 + 4001, 2):
        # fp32 numbers are even here, so `odd` is the middle of two and its square a near tie.
        above = np.float32(odd * odd)
        for near in (above, np.nextafter(above, np.float32(0))):
            root = int(sqrt(torch.tensor([float(near)])).item())
            assert (root - 1) ** 2 <= int(near) <= (root + 1) ** 2, (odd, near, root)
