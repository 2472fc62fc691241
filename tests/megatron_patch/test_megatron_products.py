"""Backward products on a GPU put N in the order of the leaves: here the order, on a CPU."""

from __future__ import annotations

import pytest
import torch

from megatron_patch.autograd.linear import _block_rows
from megatron_patch.autograd.products import by_leaf, transposed_by_leaf


@pytest.mark.parametrize(("stride", "leaves"), [(1, 1), (1, 8), (2, 1), (2, 4), (2, 8), (3, 2)])
def test_leaves_are_the_pieces_of_the_reference(stride: int, leaves: int) -> None:
    n, k, rows = stride * leaves * 3, 5, 4
    dy = torch.arange(float(rows * n)).view(rows, n)
    weight = torch.arange(float(n * k)).view(n, k) * 7
    ordered, transposed = by_leaf(dy, stride, leaves), transposed_by_leaf(weight, stride, leaves)
    assert ordered.shape == dy.shape and transposed.shape == (k, n)
    assert transposed.is_contiguous() and ordered.is_contiguous()
    width = n // leaves
    for i, piece in enumerate(_block_rows(n, stride, leaves)):
        leaf = slice(i * width, (i + 1) * width)
        assert torch.equal(ordered[:, leaf], torch.cat([dy[:, s] for s in piece], dim=1))
        assert torch.equal(transposed[:, leaf], torch.cat([weight[s] for s in piece]).t())
    assert torch.equal(ordered.double() @ transposed.double().t(), dy.double() @ weight.double())
    if stride > 1 and leaves > 1:
        assert not torch.equal(ordered, dy)
