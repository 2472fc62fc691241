"""Compile a kernel for a GPU that need not be there, and look at its instructions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

HOPPER = GPUTarget("cuda", 90, 32)
AMPERE = GPUTarget("cuda", 80, 32)


def compile_ptx(
    kernel: Any,
    types: Mapping[str, str | tuple[str, ...]],
    constants: dict[str, Any],
    target: GPUTarget,
    **options: Any,
) -> str:
    """PTX of a Triton kernel. `types`: pointers, scalars and tuples of them; `constants`: the
    constexprs."""
    names = kernel.arg_names
    missing = set(names) - set(types) - set(constants)
    assert not missing, f"{kernel.__name__}: no type for {sorted(missing)}"
    signature = {n: types.get(n, "constexpr") for n in names}
    aligned = {}
    for i, name in enumerate(names):
        kind = types.get(name, "")
        if isinstance(kind, tuple):
            aligned |= {(i, j): [["tt.divisibility", 16]] for j in range(len(kind))}
        elif kind.startswith("*"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel, signature, {(names.index(n),): v for n, v in constants.items()}, aligned
    )
    return str(compile_kernel(source, target=target, options=options).asm["ptx"])


def instructions(ptx: str) -> set[str]:
    """The distinct instruction names of a PTX text, such as `mul.rn.f32`."""
    return set(re.findall(r"^\s+(?:@%p\d+\s+)?([a-z][\w.:]+)\s", ptx, flags=re.MULTILINE))
