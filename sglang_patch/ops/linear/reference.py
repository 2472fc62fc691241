"""Products over K with one accumulator per leaf, in plain PyTorch.

A BLAS call would associate by shape, thread count and processor. Here every output element is one
accumulator over increasing k, multiply and add rounded separately, so its bits depend on its row of
x and its row of the weight alone.
"""

from __future__ import annotations

import torch

from ..formats import accumulator_dtype

# Accumulators touched between two values of k; about what a second-level cache holds.
_BLOCK_ELEMENTS = 1 << 16


def leaf_products(x: torch.Tensor, weight: torch.Tensor, num_leaves: int) -> torch.Tensor:
    """x: [M, K], weight: [N, K]; returns [num_leaves, M, N] fp32: leaf l is the product over the
    l-th of `num_leaves` equal ranges of K, k increasing, starting from zero."""
    rows, k_size = x.shape
    columns = weight.shape[0]
    width = k_size // num_leaves
    assert width * num_leaves == k_size, (k_size, num_leaves)
    wide = accumulator_dtype(x.dtype)
    # [width, leaves, ...]: one step of k for all leaves at a time, the columns contiguous.
    w = weight.to(wide).view(columns, num_leaves, width).permute(2, 1, 0).contiguous()
    a = x.to(wide).reshape(rows, num_leaves, width).permute(2, 1, 0).contiguous()
    out = torch.zeros((num_leaves, rows, columns), dtype=wide, device=x.device)
    block = max(1, _BLOCK_ELEMENTS // (columns * num_leaves))
    for start in range(0, rows, block):
        accumulator = out[:, start : start + block]
        part = a[:, :, start : start + block].unsqueeze(-1)
        local = torch.zeros(accumulator.shape, dtype=wide, device=x.device)
        product = torch.empty_like(local)
        for k in range(width):
            torch.mul(part[k], w[k].unsqueeze(1), out=product)
            local.add_(product)
        accumulator.copy_(local)
    return out


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """See `op.linear`; x: [M, K]."""
    out = leaf_products(x, weight, 1)[0]
    if bias is not None:
        out = out + bias.to(out.dtype)
    return out.to(out_dtype)
