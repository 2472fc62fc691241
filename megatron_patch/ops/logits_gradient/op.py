"""`logits_gradient`: checks, dispatch and shape inference."""

from __future__ import annotations

import torch

from ..formats import DTYPES, NAMESPACE, eager_on_gpu, require
from . import reference

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@torch.library.custom_op(f"{NAMESPACE}::logits_gradient", mutates_args=(), device_types="cpu")
def _logits_gradient(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    targets: torch.Tensor,
    normaliser: torch.Tensor,
    gradient: torch.Tensor,
    first_column: int,
    real_columns: int,
    out_dtype: str,
) -> torch.Tensor:
    return reference.logits_gradient(
        logits,
        temperature,
        targets,
        normaliser,
        gradient,
        first_column,
        real_columns,
        DTYPES[out_dtype],
    )


@_logits_gradient.register_kernel("cuda")
def _(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    targets: torch.Tensor,
    normaliser: torch.Tensor,
    gradient: torch.Tensor,
    first_column: int,
    real_columns: int,
    out_dtype: str,
) -> torch.Tensor:
    from .kernel import launch_logits_gradient

    return launch_logits_gradient(
        logits,
        temperature,
        targets,
        normaliser,
        gradient,
        first_column,
        real_columns,
        DTYPES[out_dtype],
    )


@_logits_gradient.register_fake
def _(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    targets: torch.Tensor,
    normaliser: torch.Tensor,
    gradient: torch.Tensor,
    first_column: int,
    real_columns: int,
    out_dtype: str,
) -> torch.Tensor:
    return logits.new_empty(logits.shape, dtype=DTYPES[out_dtype])


def logits_gradient(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    targets: torch.Tensor,
    normaliser: torch.Tensor,
    gradient: torch.Tensor,
    *,
    first_column: int,
    vocab_size: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Gradient of sum(gradient * logprob(targets)) with respect to some columns of the logits.

    logits: [rows, columns], those from `first_column` of the padded vocabulary on, as the lm_head
    left them; temperature: fp32, a scalar tensor or [rows, 1]; targets: [rows] int64; normaliser,
    gradient: [rows] fp32, the log of the whole sum of exponentials and the incoming gradient.
    Returns [rows, columns]: (1 at the target - softmax) * gradient / temperature, computed in fp32
    and rounded once to `out_dtype`; zeros in columns from `vocab_size` on, which are in no softmax.
    """
    rows = logits.shape[:1]
    require(
        targets.shape == normaliser.shape == gradient.shape == rows
        and targets.dtype == torch.int64
        and temperature.numel() in (1, *rows),
        f"logits_gradient: {rows[0]} rows of logits, targets {targets.dtype} "
        f"{tuple(targets.shape)}, normaliser {tuple(normaliser.shape)}, gradient "
        f"{tuple(gradient.shape)}, temperature {tuple(temperature.shape)}; one a row is needed",
    )
    require(
        out_dtype in _NAMES, f"logits_gradient: out_dtype={out_dtype}; choose from {list(_NAMES)}"
    )
    real = max(0, min(logits.shape[1], vocab_size - first_column))
    if eager_on_gpu(logits):
        from .kernel import launch_logits_gradient

        return launch_logits_gradient(
            logits, temperature, targets, normaliser, gradient, first_column, real, out_dtype
        )
    return _logits_gradient(
        logits, temperature, targets, normaliser, gradient, first_column, real, _NAMES[out_dtype]
    )
