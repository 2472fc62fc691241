"""Products over K with one accumulator per leaf, in plain PyTorch.

A BLAS call would associate by shape, thread count and processor. Here every output element is one
accumulator over increasing k, multiply and add rounded separately, so its bits depend on its row of
x and its row of the weight alone.
"""

from __future__ import annotations

import torch

from ..formats import accumulator_dtype

# Elements of products held at a time: about what a second-level cache holds. Small problems form
# the products of many k in one call and large ones take fewer rows; the additions are the same.
_BLOCK_ELEMENTS = 1 << 17


def leaf_products(x: torch.Tensor, weight: torch.Tensor, num_leaves: int) -> torch.Tensor:
    """x: [M, K], weight: [N, K]; returns [num_leaves, M, N] fp32: leaf l is the product over the
    l-th of `num_leaves` equal ranges of K, k increasing, starting from zero."""
    rows, k_size = x.shape
    columns = weight.shape[0]
    width = k_size // num_leaves
    assert width * num_leaves == k_size, (k_size, num_leaves)
    wide = accumulator_dtype(x.dtype)
    # [width, leaves, ...]: one step of k for all leaves at a time, the columns contiguous.
    w = weight.to(wide).view(columns, num_leaves, width).permute(2, 1, 0).contiguous().unsqueeze(2)
    a = x.to(wide).reshape(rows, num_leaves, width).permute(2, 1, 0).unsqueeze(-1)
    out = torch.zeros((num_leaves, rows, columns), dtype=wide, device=x.device)
    block = min(rows, max(1, _BLOCK_ELEMENTS // (columns * num_leaves)))
    steps = max(1, _BLOCK_ELEMENTS // (columns * num_leaves * block)) if rows else 1
    products = torch.empty((steps, num_leaves, block, columns), dtype=wide, device=x.device)
    for start in range(0, rows, max(1, block)):
        part = a[:, :, start : start + block]
        accumulator = torch.zeros((num_leaves, part.shape[2], columns), dtype=wide, device=x.device)
        held = products[:, :, : part.shape[2]]
        for k in range(0, width, steps):
            some = held[: min(steps, width - k)]
            torch.mul(part[k : k + steps], w[k : k + steps], out=some)
            for product in some.unbind(0):
                accumulator.add_(product)
        out[:, start : start + block] = accumulator
    return out


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """See `op.linear`; x: [M, K]."""
    out = leaf_products(x, weight, 1)[0]
    if bias is not None:
        out = out + bias.to(out.dtype)
    return out.to(out_dtype)
