"""The published op over the CPU reference: order, bias, shapes, strides, gradients, refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from miles_launcher.conformance.bits import differing, exact_leaves, one_ulp, random, small_integers
from miles_launcher.conformance.oracle import products
from sglang_patch.ops import matmul_tp_inv, row_linear
from sglang_patch.schema.reduction import row_reduction

ROOT = Path(__file__).parents[3]
BF16 = torch.bfloat16
V1 = "qwen3_dense_true_on_policy_v1"
TILES = (1, 2, 3, 4, 6, 7, 8, 12, 16, 19, 24, 32, 37, 38, 40, 48, 64, 76, 100, 148)
# The length of a run, as published.
FIRST = {
    4: 2, 6: 3, 8: 2, 12: 3, 16: 2, 19: 19, 24: 3, 32: 2, 38: 19, 40: 5, 48: 3, 64: 2, 76: 19,
}  # fmt: skip
OP = torch.ops.tp_inv_ops.matmul_tp_inv.default


def leaves(x: torch.Tensor, weight: torch.Tensor, tiles: int) -> list[torch.Tensor]:
    """Each tile's product in bf16. The inputs' products are exact in fp32, so BLAS will do."""
    cuts = [slice(i * 128, (i + 1) * 128) for i in range(tiles)]
    return [(x[:, c].double() @ weight[:, c].double().t()).float().to(BF16) for c in cuts]


def written(parts: list[torch.Tensor], first: int) -> torch.Tensor:
    """Runs of `first` left to right, then neighbours in pairs; every sum an fp32 sum, rounded."""

    def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.float() + b.float()).to(BF16)

    runs = []
    for start in range(0, len(parts), first):
        total = parts[start]
        for part in parts[start + 1 : start + first]:
            total = add(total, part)
        runs.append(total)
    while len(runs) > 1:
        runs = [add(a, b) for a, b in zip(runs[0::2], runs[1::2], strict=True)]
    return runs[0]


@pytest.mark.parametrize("tiles", TILES)
def test_the_published_order_at_every_number_of_tiles(tiles: int) -> None:
    first = FIRST.get(tiles, products.first_of(tiles))
    x = exact_leaves(24, tiles * 128, tiles, seed=tiles)
    weight, bias = small_integers(20, tiles * 128, seed=2), random(20, seed=3)
    parts = leaves(x, weight, tiles)
    out = torch.ops.tp_inv_ops.matmul_tp_inv(x, weight.t())
    assert differing(out, written(parts, first)) == 0
    assert differing(one_ulp(out), out) == 1
    with_bias = matmul_tp_inv(x, weight.t(), bias)
    assert differing(with_bias, (out.float() + bias.float()).to(BF16)) == 0
    if tiles > 1:
        once = x.double() @ weight.double().t()
        assert differing(once.float().to(BF16), out) > 0, "the roundings between tiles must show"
    if tiles > 3 and first < tiles:
        assert differing(written(parts, tiles), out) > 0, "one run over all tiles must show"
    if first > 3 or (first == 3 and tiles > 3):
        size = 1 << (tiles - 1).bit_length()
        padded = parts + [torch.zeros_like(parts[0])] * (size - tiles)
        assert differing(written(padded, 2), out) > 0, "a plain tree must show"


def test_the_bias_is_added_in_bf16_to_the_rounded_product() -> None:
    x, weight, bias = random(9, 768, seed=4), random(30, 768, seed=5), random(30, seed=6)
    out = matmul_tp_inv(x, weight.t(), bias)
    reduction = row_reduction(V1, 768)
    assert differing(out, row_linear(x, weight, bias, reduction=reduction)) == 0
    exact = x.double() @ weight.double().t() + bias.double()
    assert differing(out, exact.to(BF16)) > 0
    # The first of two ranks adds it, before the ranks' parts are added.
    cut = slice(0, 384), slice(384, 768)
    first, second = (matmul_tp_inv(x[:, c], weight[:, c].t()) for c in cut)
    two = row_reduction(V1, 768, rollout_tp=2)
    mine = matmul_tp_inv(x[:, cut[0]], weight[:, cut[0]].t(), bias)
    assert differing(mine + second, row_linear(x, weight, bias, reduction=two)) == 0
    assert differing((first + second) + bias, mine + second) > 0, "adding it last must show"


def test_sequences_and_slices_have_the_bits_of_matrices() -> None:
    x, weight, bias = random(12, 512, seed=7), random(10, 512, seed=8), random(10, seed=9)
    flat = matmul_tp_inv(x, weight.t(), bias)
    assert flat.is_contiguous() and flat.shape == (12, 10)
    for shape in ((3, 4), (2, 3, 2), (12, 1)):
        out = matmul_tp_inv(x.view(*shape, 512), weight.t(), bias)
        assert out.shape == (*shape, 10) and differing(out.view(12, 10), flat) == 0
    wide = torch.cat((random(12, 24, seed=10), x, random(12, 7, seed=11)), dim=1)
    slices = {
        "rows of a wider matrix": (wide[:, 24:536], weight.t()),
        "every second row": (x.repeat_interleave(2, 0)[::2], weight.t()),
        "k not contiguous": (x.t().contiguous().t(), weight.t()),
        "a contiguous [K, N]": (x, weight.t().contiguous()),
        "columns of a wider weight": (x, torch.cat((weight, weight)).t()[:, :10]),
        "every second k": (x.repeat_interleave(2, 1)[:, ::2], weight.t()),
    }
    for name, (a, b) in slices.items():
        out = matmul_tp_inv(a, b, bias)
        assert differing(out, flat) == 0 and out.is_contiguous(), name
    swapped = x.view(3, 4, 512).transpose(0, 1)
    assert not swapped.is_contiguous()
    out = matmul_tp_inv(swapped, weight.t(), bias)
    assert differing(out.transpose(0, 1).reshape(12, 10), flat) == 0
    assert matmul_tp_inv(x[:0], weight.t(), bias).shape == (0, 10)


def test_registration_and_gradients() -> None:
    assert str(OP._schema) == (
        "tp_inv_ops::matmul_tp_inv(Tensor a, Tensor b, Tensor? bias=None) -> Tensor"
    )
    x, weight, bias = random(2, 3, 256, seed=12), random(8, 256, seed=13), random(8, seed=14)
    learnt = [t.clone().requires_grad_() for t in (x, weight.t(), bias)]
    for arguments in (
        (x, weight.t()),
        (x, weight.t(), bias),
        tuple(learnt),
        (x[:, 1:], weight.t()),
    ):
        torch.library.opcheck(OP, arguments)
    wide = [t.double().clone().requires_grad_() for t in (x, weight.t(), bias)]
    assert torch.autograd.gradcheck(matmul_tp_inv, wide, fast_mode=True)
    assert torch.autograd.gradcheck(matmul_tp_inv, wide[:2], fast_mode=True)
    gradients = [torch.autograd.grad(matmul_tp_inv(*learnt).sum(), learnt) for _ in range(2)]
    for one, two, leaf in zip(*gradients, learnt, strict=True):
        assert differing(one, two) == 0 and one.shape == leaf.shape and one.dtype == BF16


def test_both_packages_share_the_published_name() -> None:
    import megatron_patch.ops

    x, weight = random(3, 384, seed=15), random(4, 384, seed=16)
    mine, theirs = matmul_tp_inv(x, weight.t()), megatron_patch.ops.matmul_tp_inv(x, weight.t())
    assert differing(mine, theirs) == 0


def test_refusals_carry_the_numbers() -> None:
    x, weight = random(2, 256, seed=17), random(3, 256, seed=18)
    cases = {
        r"K=192 .*multiple of the 128": lambda: matmul_tp_inv(x[:, :192], weight[:, :192].t()),
        r"K=64 ": lambda: matmul_tp_inv(x[:, :64], weight[:, :64].t()),
        r"\(2, 256\).*\(3, 256\).*weight\.t\(\)": lambda: matmul_tp_inv(x, weight),
        r"float32.*bfloat16": lambda: matmul_tp_inv(x.float(), weight.t()),
        r"float16.*bfloat16": lambda: matmul_tp_inv(x.half(), weight.t().half()),
        r"bias is \(\(2,\)": lambda: matmul_tp_inv(x, weight.t(), x[:, 0]),
        r"bias is .*float32": lambda: matmul_tp_inv(x, weight.t(), weight[:, 0].float()),
        r"it takes \[\.\.\., M, K\]": lambda: matmul_tp_inv(x[0], weight.t()),
        r"on cpu, b on meta": lambda: matmul_tp_inv(x, weight.t().to("meta")),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_another_packages_op_of_the_published_name_is_never_ours() -> None:
    """Whoever took `tp_inv_ops` first keeps it; the function still runs this package's text."""
    code = """
import torch
library = torch.library.Library("tp_inv_ops", "DEF")
library.define("matmul_tp_inv(Tensor a, Tensor b, Tensor? bias=None) -> Tensor")
library.impl("matmul_tp_inv", lambda a, b, bias=None: torch.full((2, 3), 7.0), "CPU")
from sglang_patch.ops import matmul_tp_inv
a, b = torch.ones(2, 128).bfloat16(), torch.ones(128, 3).bfloat16()
assert (torch.ops.tp_inv_ops.matmul_tp_inv(a, b) == 7.0).all()
for x in (a, a.clone().requires_grad_()):
    assert (matmul_tp_inv(x, b) == 128.0).all()
"""
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
