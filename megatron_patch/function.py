"""A typed door to `torch.autograd.Function.apply`, which torch leaves untyped."""

from __future__ import annotations

from typing import Any

import torch


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply(*arguments)`."""
    untyped: Any = function
    return untyped.apply(*arguments)
