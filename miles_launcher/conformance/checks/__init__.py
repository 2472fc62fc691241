"""One module per op: what is claimed of it, and how that is shown."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import (
    attention,
    digest,
    elementary,
    linear,
    log_softmax,
    qk_norm_rope,
    rms_norm,
    rope,
    rope_table,
    row_linear,
    silu_mul,
    temperature,
    tree_all_reduce,
)
from .common import OpSuite
from .row_linear_cases import V1, V2

OPS: Mapping[str, OpSuite] = MappingProxyType(
    {
        suite.name: suite
        for suite in (
            elementary.SUITE,
            rms_norm.SUITE,
            linear.SUITE,
            rope_table.SUITE,
            rope.SUITE,
            qk_norm_rope.SUITE,
            attention.SUITE,
            row_linear.suite("row_linear_v1", V1),
            row_linear.suite("row_linear_v2", V2),
            tree_all_reduce.SUITE,
            silu_mul.SUITE,
            temperature.SUITE,
            log_softmax.SUITE,
            digest.SUITE,
        )
    }
)

__all__ = ["OPS", "OpSuite"]
