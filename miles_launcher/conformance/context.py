"""What a check is handed: the ops, the device, the sizes, and comparisons that count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from .bits import bits
from .oracle.numbers import Array
from .properties import Mismatch
from .setting import Setting
from .subject import Subject, elementary

Target = Literal["cpu", "cuda", "interpreter"]
Check = Callable[["Context"], str]


@dataclass(slots=True, kw_only=True)
class Context:
    """One check's surroundings. `target` is `interpreter` where Triton's interpreter runs the
    kernels on the CPU; `compared` grows with every comparison, and none at all is a failure."""

    subject: Subject
    setting: Setting
    target: Target
    reference: Subject
    compared: int = 0
    degrees: tuple[int, ...] = ()

    @property
    def kernels(self) -> bool:
        """Whether kernels run, with a table and an order of their own inside a product."""
        return self.target != "cpu"

    @property
    def exact_products(self) -> bool:
        """Whether the inside of a product is the written order. A tensor core has its own; the
        interpreter's product is made to be the reference's."""
        return self.target != "cuda"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.target == "cuda" else "cpu")

    def with_subject(self, subject: Subject) -> Context:
        """The same surroundings for another subject, counting from zero."""
        return replace(self, subject=subject, compared=0)

    def put(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The tensors on the device under test."""
        return [t.to(self.device) for t in tensors]

    def equal(self, found: torch.Tensor, expected: torch.Tensor | Array, label: str) -> None:
        """Bits of the device's result against the oracle's; `Mismatch` with the count and the
        first element that differs."""
        here, there = integers(found), integers(expected)
        if here.shape != there.shape:
            raise Mismatch(f"{label}: shape {tuple(here.shape)}, expected {tuple(there.shape)}")
        if isinstance(expected, torch.Tensor) and expected.dtype != found.dtype:
            raise Mismatch(f"{label}: {found.dtype}, expected {expected.dtype}")
        if not here.numel():
            raise Mismatch(f"{label}: zero elements compared")
        self.compared += here.numel()
        unequal = here != there
        count = int(unequal.sum())
        if count:
            at = tuple(int(i) for i in unequal.nonzero()[0])
            mask = (1 << (8 * here.element_size())) - 1
            raise Mismatch(
                f"{label}: {count} of {here.numel()} elements differ, first at {at}: "
                f"{int(here[at]) & mask:x}, expected {int(there[at]) & mask:x}"
            )

    def shows(self, one: torch.Tensor | Array, other: torch.Tensor | Array, label: str) -> None:
        """Another order must give other bits, or the inputs could not have shown a wrong one."""
        if torch.equal(integers(one), integers(other)):
            raise Mismatch(f"{label}: the inputs show nothing, another order has the same bits")

    def near(
        self, found: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor | float, label: str
    ) -> float:
        """Every element within `bound` of the fp64 value; returns the largest share of it used."""
        distance = (found.cpu().double() - exact.cpu().double()).abs()
        limit = torch.as_tensor(bound, dtype=torch.float64).expand_as(distance)
        if not distance.numel():
            raise Mismatch(f"{label}: zero elements compared")
        self.compared += distance.numel()
        # A NaN is within nothing.
        outside = ~(distance <= limit)
        if outside.any():
            at = tuple(int(i) for i in outside.nonzero()[0])
            raise Mismatch(
                f"{label}: {int(outside.sum())} of {distance.numel()} elements too far from fp64, "
                f"first at {at}: distance {float(distance[at]):.3g}, bound {float(limit[at]):.3g}"
            )
        share = distance / limit.clamp_min(1e-300)
        return float(share.max())

    def require(self, condition: bool, message: str) -> None:
        """One thing that must hold beside the numbers; `Mismatch` where it does not."""
        self.compared += 1
        if not condition:
            raise Mismatch(message)

    def refused(self, call: Callable[[], object], label: str) -> None:
        """`call` must raise ValueError: what a contract does not name is never computed."""
        self.compared += 1
        try:
            call()
        except ValueError:
            return
        raise Mismatch(f"{label}: accepted, and a ValueError was due")

    def exp(self, x: Array) -> Array:
        """The CPU's exponential, which `elementary` is judged for on its own."""
        return _elementwise(elementary.exp, x)

    def log(self, x: Array) -> Array:
        """The CPU's logarithm, likewise."""
        return _elementwise(elementary.log, x)


def _elementwise(function: Callable[..., Any], x: Array) -> Array:
    result: Array = function(torch.from_numpy(np.ascontiguousarray(x))).numpy()
    return result


def array(x: torch.Tensor) -> Array:
    """A bf16 or fp32 tensor as fp32 numbers for the oracle."""
    assert x.dtype in (torch.bfloat16, torch.float32), x.dtype
    result: Array = x.detach().cpu().float().numpy()
    return result


def integers(x: torch.Tensor | Array) -> torch.Tensor:
    """The bits as integers: fp32 bits for bf16 and fp32, which keeps unequal bf16 unequal."""
    if isinstance(x, np.ndarray):
        assert x.dtype == np.float32, x.dtype
        return bits(torch.from_numpy(np.ascontiguousarray(x)))
    here = x.detach().cpu()
    return bits(here.float() if here.dtype == torch.bfloat16 else here)
