"""A remembered binary is launched only for arguments that Triton would give the same binary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from sglang_patch.ops import launch as module
from sglang_patch.ops.launch import launch


@triton.jit
def some_kernel(x_ptr, out_ptr, rows, SIZE: tl.constexpr, NAME: tl.constexpr):
    tl.store(out_ptr, tl.load(x_ptr) + rows)


class Binary:
    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.log.append((grid, arguments))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any]]:
    """(what was compiled, what was launched from memory), with no GPU."""
    asked: list[Any] = []
    launched: list[Any] = []

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> Binary:
        asked.append((grid, arguments, constants))
        return Binary(launched)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "_BINARIES", {})
    return asked, launched


def aligned(offset: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(64, dtype=dtype)[offset:]


def test_the_second_launch_passes_everything_in_the_signatures_order(
    compiled: tuple[list[Any], list[Any]],
) -> None:
    asked, launched = compiled
    x, out = aligned(), aligned()
    options = {"NAME": "a", "num_warps": 4, "SIZE": 8}
    launch(some_kernel, (5,), (x, out, 48), options)
    assert asked == [((5,), (x, out, 48), options)] and not launched
    y = aligned()
    launch(some_kernel, (7, 2), (y, out, 64), options)
    assert len(asked) == 1
    [(grid, arguments)] = launched
    assert grid == (7, 2, 1)
    assert arguments[0] is y and arguments[2:] == (64, 8, "a")


@pytest.mark.parametrize(
    ("arguments", "constants"),
    [
        ((aligned(1), aligned(), 48), {}),
        ((aligned(dtype=torch.int32), aligned(), 48), {}),
        ((aligned(), aligned(), 1), {}),
        ((aligned(), aligned(), True), {}),
        ((aligned(), aligned(), 47), {}),
        ((aligned(), aligned(), 1 << 36), {}),
        ((None, aligned(), 48), {}),
        ((aligned(), aligned(), 48.0), {}),
        (((aligned(), aligned()), aligned(), 48), {}),
        ((aligned(), aligned(), 48), {"SIZE": 16}),
        ((aligned(), aligned(), 48), {"NAME": "b"}),
        ((aligned(), aligned(), 48), {"num_warps": 8}),
    ],
)
def test_whatever_triton_specialises_on_asks_the_compiler_again(
    compiled: tuple[list[Any], list[Any]], arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    asked, launched = compiled
    options = {"SIZE": 8, "NAME": "a", "num_warps": 4}
    launch(some_kernel, (1,), (aligned(), aligned(), 48), options)
    launch(some_kernel, (1,), arguments, {**options, **constants})
    assert len(asked) == 2 and not launched


def test_a_tensor_descriptor_counts_by_its_box_and_layout(
    compiled: tuple[list[Any], list[Any]],
) -> None:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    asked, _ = compiled
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    options = {"SIZE": 8, "NAME": "a"}
    for box, swizzle in (([64, 64], 128), ([64, 64], 128), ([32, 64], 128), ([64, 32], 64)):
        descriptor = TensorDescriptor.from_tensor(x, box, NVMMASharedLayout(swizzle, 16, rank=2))
        launch(some_kernel, (1,), (descriptor, x, 48), options)
    assert len(asked) == 3


def test_a_tuple_counts_by_what_it_holds(compiled: tuple[list[Any], list[Any]]) -> None:
    asked, launched = compiled
    options = {"SIZE": 8, "NAME": "a"}
    pairs = [(aligned(), aligned()), (aligned(), aligned(1)), (aligned(), aligned(), aligned())]
    for pair in pairs:
        launch(some_kernel, (1,), (pair, aligned(), 48), options)
    assert len(asked) == 3 and not launched
    again = (aligned(), aligned())
    launch(some_kernel, (1,), (again, aligned(), 48), options)
    assert len(asked) == 3 and launched[0][1][0] is again


def test_a_missing_constant_is_our_own_mistake(compiled: tuple[list[Any], list[Any]]) -> None:
    with pytest.raises(AssertionError):
        launch(some_kernel, (1,), (aligned(), aligned(), 48), {"SIZE": 8})
