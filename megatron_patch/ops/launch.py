"""Launching a kernel without asking the compiler again what it was asked before.

`kernel[grid](...)` looks at every argument in Python at each launch; an eager training step has
thousands of launches, and this was most of its time. What decides the binary is remembered here,
by the rules of Triton's own specialization (never coarser), and the binary is launched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from triton.runtime.jit import JITFunction

_BINARIES: Final[dict[tuple[Any, ...], Any]] = {}
_INT32: Final = 1 << 31


def _kind(argument: Any) -> Any:
    """What of an argument can decide which binary runs."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int) and type(argument) is not bool:
        # 1 is folded in, multiples of 16 are used for wide loads, and the size is the type's.
        return argument == 1, argument % 16 == 0, -_INT32 <= argument < _INT32
    if isinstance(argument, (bool, float)) or argument is None:
        return type(argument)
    if type(argument) is tuple:
        return tuple(map(_kind, argument))
    # A tensor descriptor: its box and layout are part of its type.
    return argument.base.dtype, tuple(argument.block_shape), argument.layout, argument.padding


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: Mapping[str, Any]
) -> None:
    """`kernel[grid](*arguments, **constants)` for a `triton.jit` or `gluon.jit` function.

    arguments: every parameter that is no constexpr, which must come first in the signature;
    constants: the constexprs and the compiler's options, by name.
    """
    if not isinstance(kernel, JITFunction):
        # Triton's interpreter, which has no binaries.
        kernel[grid](*arguments, **constants)
        return
    key = (id(kernel), torch.cuda.current_device(), *map(_kind, arguments), *constants.items())
    binary = _BINARIES.get(key)
    if binary is None:
        names = kernel.arg_names
        assert len(names) >= len(arguments) and set(names[len(arguments) :]) <= constants.keys(), (
            names,
            sorted(constants),
        )
        _BINARIES[key] = kernel[grid](*arguments, **constants)
        return
    whole = (*grid, 1, 1)[:3]
    rest = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
    binary[whole](*arguments, *rest)
