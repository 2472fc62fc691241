"""What the suite can show of an op, as data: the properties, the outcomes, one result a cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Status(StrEnum):
    """`NOT_APPLICABLE` is a property that the op cannot have here; `NOT_SHOWN` one that it could
    have and that nothing exercised."""

    OK = "ok"
    FAILED = "failed"
    NOT_SHOWN = "not shown"
    NOT_APPLICABLE = "not applicable"


# In the order in which a row of the table reads.
PROPERTIES: Mapping[str, str] = MappingProxyType(
    {
        "order": "bits equal the written order, which the oracle evaluates; another order shows",
        "value": "distance to the fp64 value within the bound that its roundings explain",
        "dtypes": "every number format of the contract; others are refused",
        "shapes": "rows 1 to 257 around the tile borders, odd widths, strides, nothing at all",
        "neighbours": "a row has the same bits alone and at any place beside other rows",
        "phases": "prefill, chunk and decode give a token the same bits",
        "tp_shards": "shards of tensor-parallel degree 1, 2, 4 and 8, one after another",
        "tp_ranks": "real ranks of degree 2, 4 and 8, in processes of their own",
        "split_k": "kernels that split K over programs give the one-pass bits",
        "kernel_table": "every entry of the kernel table, forced in turn, gives the same bits",
        "cpu_bits": "the kernel has the bits of the CPU reference",
        "run_to_run": "the same call again gives the same bits",
        "fault": "one ulp in one result turns the op's own check red",
    }
)

# What only a kernel can have; on a CPU the reference runs, one path for every size.
KERNEL_ONLY: Mapping[str, str] = MappingProxyType(
    {
        "split_k": "the CPU runs the reference, which has no split-K path",
        "kernel_table": "the CPU runs the reference, which has no kernel table",
        "cpu_bits": "this is the CPU",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One cell of the table. `compared` counts the elements whose bits or values were compared;
    `degrees` are the tensor-parallel degrees that ran, where the property is about them."""

    op: str
    property: str
    status: Status
    detail: str
    compared: int = 0
    seconds: float = 0.0
    degrees: tuple[int, ...] = ()


class Mismatch(Exception):
    """A claim was exercised and does not hold; the message has the numbers."""


class NotShown(Exception):
    """A claim could not be exercised here; the message says what is missing. `degrees` are the
    tensor-parallel degrees that were exercised all the same."""

    def __init__(self, reason: str, degrees: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.degrees = degrees


class NotApplicable(Exception):
    """There is nothing of the kind to exercise on this device; the message says why."""
