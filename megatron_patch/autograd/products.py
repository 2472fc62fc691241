"""Matrix products of a backward pass, in blocks that do not depend on the tensor-parallel size.

BLAS associates by shape. A dimension that tensor parallelism cuts is therefore always cut into the
same `block_count` pieces, whoever holds them: every piece is a call of one shape, and the pieces
are added as one balanced tree, so that TP=1 and TP=2 give the same fp32 bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from ..ops.formats import accumulator_dtype

# How often each differentiable op ran forward, by name; read by `readback`.
op_calls: Counter[str] = Counter()

_MOST_BLOCKS = 8


def block_count(size_global: int, num_ranks: int) -> int:
    """Equal blocks in which a dimension of `size_global`, held by `num_ranks`, is processed.

    Eight, or the largest power of two that divides the size; at least one block a rank.
    """
    count = _MOST_BLOCKS
    while count > num_ranks and size_global % count:
        count //= 2
    return count if size_global % count == 0 and count % num_ranks == 0 else num_ranks


def operand(x: torch.Tensor) -> torch.Tensor:
    """`x` as `product` wants it: bf16 stays bf16 on a GPU (tensor cores), becomes fp32 on a CPU."""
    if x.device.type == "cpu" and x.dtype != torch.float64:
        return x.float()
    return x


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] @ b [K, N] -> [M, N] with an fp32 (fp64) accumulator that is not rounded."""
    if a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


def on_tensor_cores(x: torch.Tensor) -> bool:
    """Whether a backward product takes the GPU's path: the forward's kernels for the gradients of
    activations, whose bits depend on no shape, and one fp32-accumulating product for weights."""
    return x.is_cuda and x.dtype == torch.bfloat16


def by_leaf(x: torch.Tensor, stride: int, leaves: int) -> torch.Tensor:
    """The last dimension of x [rows, stride * leaves * width], `stride` matrices side by side, put
    in the order of the leaves: leaf i is piece i of every matrix."""
    if stride == 1 or leaves == 1:
        return x
    return x.view(x.shape[0], stride, leaves, -1).transpose(1, 2).reshape(x.shape)


def transposed_by_leaf(weight: torch.Tensor, stride: int = 1, leaves: int = 1) -> torch.Tensor:
    """weight [N, K] -> [K, N] contiguous, its N in the order of `by_leaf`."""
    n, k = weight.shape
    pieces = weight.view(stride, leaves, n // (stride * leaves), k)
    return pieces.permute(3, 1, 0, 2).reshape(k, n).contiguous()


def add_weight_gradient(target: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """target [N, K] fp32 += dy [rows, N].T @ x [rows, K], bf16 on a GPU, in one product."""
    torch.addmm(target, dy.t(), x, out_dtype=torch.float32, out=target)


def tree(count: int, leaf: Callable[[int], torch.Tensor], start: int = 0) -> torch.Tensor:
    """Balanced tree over `count` (a power of two, or any count: then left to right) leaves, made
    one after the other so that few are alive at a time."""
    if count & (count - 1):
        total = leaf(start)
        for i in range(start + 1, start + count):
            total = total + leaf(i)
        return total
    if count == 1:
        return leaf(start)
    half = count // 2
    return tree(half, leaf, start) + tree(half, leaf, start + half)


def parameter_gradient(
    parameter: torch.Tensor, add: Callable[[torch.Tensor], object]
) -> torch.Tensor | None:
    """Give `add` the fp32 tensor into which this parameter's gradient goes.

    That is megatron's `main_grad` where DistributedDataParallel made one (then None is returned
    to autograd, and the parameter is marked), otherwise a new tensor, returned in the parameter's
    dtype.
    """
    main = getattr(parameter, "main_grad", None)
    if main is not None:
        add(main)
        parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return None
    gradient = torch.zeros(
        parameter.shape, dtype=accumulator_dtype(parameter.dtype), device=parameter.device
    )
    add(gradient)
    return gradient.to(parameter.dtype)
