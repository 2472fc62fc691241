"""Backward of the head norms and the rotation in one launch, into the fused projection's layout."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from ...ops.launch import launch
from ...ops.qk_norm_rope.kernel import check_heads, head_strides
from . import processors
from .columns import add_pairs

# Heads of a program, and its warps: of heads of 128, eight elements of each half a thread.
_HEADS: Final = 16
_WARPS: Final = 4
# Programs a processor: as many as its registers leave room for, so that all run at once and each
# gets as many tokens (or one fewer).
_RESIDENT: Final = 5


@triton.jit
def _block_of_heads(
    x_ptr, weight_ptr, gradient_ptr, out_ptr, value_gradient_ptr, value_out_ptr, parts_ptr,
    positions_ptr, table_ptr, program, step, tokens, programs, eps, token_stride, group_stride,
    head_stride, out_token_stride, out_group_stride, out_head_stride, gradient_token_stride,
    gradient_head_stride, value_token_stride, value_head_stride, positions_stride,
    HEADS: tl.constexpr, PER_GROUP: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
    HAS_VALUE: tl.constexpr,
):  # fmt: skip
    """The heads from step * ROWS on, over the program's tokens."""
    column = tl.arange(0, HALF)[None, :]
    head = step * ROWS + tl.arange(0, ROWS)[:, None]
    inside = head < HEADS
    group = (head // PER_GROUP).to(tl.int64)
    member = head % PER_GROUP
    source = x_ptr + group * group_stride + member * head_stride + column
    given = gradient_ptr + head * gradient_head_stride + column
    target = out_ptr + group * out_group_stride + member * out_head_stride + column
    left_total = tl.zeros((ROWS, HALF), tl.float32)
    right_total = tl.zeros((ROWS, HALF), tl.float32)
    for number in range(program, tokens, programs):
        token = tl.cast(number, tl.int64)
        position = tl.load(positions_ptr + token * positions_stride).to(tl.int64)
        at = source + token * token_stride
        a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
        at = given + token * gradient_token_stride
        left = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
        if HAS_VALUE:
            # The value's gradient is only carried to its place.
            at = value_gradient_ptr + token * value_token_stride + head * value_head_stride
            first = tl.load(at + column, mask=inside, other=0.0)
            second = tl.load(at + HALF + column, mask=inside, other=0.0)
            at = value_out_ptr + token * out_token_stride + group * out_group_stride + column
            tl.store(at, first, mask=inside)
            tl.store(at + HALF, second, mask=inside)
        angles = table_ptr + position * (2 * HALF) + column
        cos, sin = tl.load(angles), tl.load(angles + HALF)
        # The rotation by the opposite angle.
        da = left * cos + right * sin
        db = right * cos - left * sin
        na = da * tl.load(weight_ptr + column).to(tl.float32)
        nb = db * tl.load(weight_ptr + HALF + column).to(tl.float32)
        squares, products = tl.reduce((a * a + b * b, na * a + nb * b), 1, add_pairs)
        scale = 1.0 / tl.sqrt_rn(squares * (0.5 / HALF) + eps)
        shared = (products * (0.5 / HALF) * scale * scale)[:, None]
        scale = scale[:, None]
        at = target + token * out_token_stride
        narrow = out_ptr.dtype.element_ty
        tl.store(at, (scale * (na - a * shared)).to(narrow), mask=inside)
        tl.store(at + HALF, (scale * (nb - b * shared)).to(narrow), mask=inside)
        # The weight multiplied the rounded value.
        left_total += da * (a * scale).to(tl.bfloat16).to(tl.float32)
        right_total += db * (b * scale).to(tl.bfloat16).to(tl.float32)
    part = parts_ptr + (step * programs + program) * (2 * HALF) + column
    tl.store(part, tl.sum(left_total, axis=0)[None, :])
    tl.store(part + HALF, tl.sum(right_total, axis=0)[None, :])


@triton.jit(do_not_specialize=["tokens", "programs"])
def qk_norm_rope_backward_kernel(
    query_ptr, key_ptr, query_weight_ptr, key_weight_ptr, positions_ptr, table_ptr,
    query_gradient_ptr, key_gradient_ptr, value_gradient_ptr, query_out_ptr, key_out_ptr,
    value_out_ptr, query_parts_ptr, key_parts_ptr, tokens, programs, eps, query_token_stride,
    query_group_stride, query_head_stride, key_token_stride, key_head_stride, out_token_stride,
    out_group_stride, out_head_stride, query_gradient_token_stride, query_gradient_head_stride,
    key_gradient_token_stride, key_gradient_head_stride, value_gradient_token_stride,
    value_gradient_head_stride, positions_stride, QUERY_HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr, KEY_HEADS: tl.constexpr, QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Program (p, step) takes the tokens p, p + programs, ... of one block of heads, the query's
    blocks first, then the key's, and adds up their share of the weight's gradient in this order."""
    program = tl.program_id(0)
    step = tl.program_id(1)
    QUERY_STEPS: tl.constexpr = (QUERY_HEADS + QUERY_ROWS - 1) // QUERY_ROWS
    if step < QUERY_STEPS:
        _block_of_heads(
            query_ptr, query_weight_ptr, query_gradient_ptr, query_out_ptr, value_gradient_ptr,
            value_out_ptr, query_parts_ptr, positions_ptr, table_ptr, program, step, tokens,
            programs, eps, query_token_stride, query_group_stride, query_head_stride,
            out_token_stride, out_group_stride, out_head_stride, query_gradient_token_stride,
            query_gradient_head_stride, value_gradient_token_stride, value_gradient_head_stride,
            positions_stride, QUERY_HEADS, PER_GROUP, QUERY_ROWS, HALF, False,
        )  # fmt: skip
    else:
        _block_of_heads(
            key_ptr, key_weight_ptr, key_gradient_ptr, key_out_ptr, value_gradient_ptr,
            value_out_ptr, key_parts_ptr, positions_ptr, table_ptr, program, step - QUERY_STEPS,
            tokens, programs, eps, key_token_stride, key_head_stride, 0, out_token_stride,
            out_group_stride, 0, key_gradient_token_stride, key_gradient_head_stride,
            value_gradient_token_stride, value_gradient_head_stride, positions_stride, KEY_HEADS,
            1, KEY_ROWS, HALF, True,
        )  # fmt: skip


def launch_qk_norm_rope_backward(
    heads: tuple[torch.Tensor, torch.Tensor],
    weights: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    positions: torch.Tensor,
    table: torch.Tensor,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    rows: int = _HEADS,
    warps: int = _WARPS,
    resident: int = _RESIDENT,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes the gradients of query, key and value into `places`; returns those of the query's and
    of the key's weight, each [programs, head_dim] fp32, to be added over programs.

    heads: query [tokens, groups, heads of a group, head_dim] and key [tokens, groups, head_dim],
    before the norm; gradients: of the results, [tokens, heads, head_dim], the query's first;
    places: query like the query, key and value like the key, views of one gradient in which the
    groups lie alike.
    """
    query, key = heads
    check_heads("query", query)
    check_heads("key", key)
    dquery, dkey, dvalue = (g if g.stride(-1) == 1 else g.contiguous() for g in gradients)
    (tokens, groups, per_group, dim), (query_out, key_out, value_out) = query.shape, places
    out_token, out_group, out_head = head_strides(query_out)
    assert {key_out.stride(), value_out.stride()} == {(out_token, out_group, 1)}
    query_rows = min(rows, triton.next_power_of_2(groups * per_group))
    key_rows = min(rows, triton.next_power_of_2(groups))
    query_steps = triton.cdiv(groups * per_group, query_rows)
    key_steps = triton.cdiv(groups, key_rows)
    room = resident * processors(query.device) // (query_steps + key_steps)
    programs = max(1, min(tokens, room))
    query_parts, key_parts = (
        torch.empty((steps * programs, dim), dtype=torch.float32, device=query.device)
        for steps in (query_steps, key_steps)
    )
    launch(
        qk_norm_rope_backward_kernel,
        (programs, query_steps + key_steps),
        (
            query,
            key,
            weights[0].contiguous(),
            weights[1].contiguous(),
            positions,
            table.contiguous(),
            dquery,
            dkey,
            dvalue,
            query_out,
            key_out,
            value_out,
            query_parts,
            key_parts,
            tokens,
            programs,
            eps,
            *head_strides(query),
            key.stride(0),
            key.stride(1),
            out_token,
            out_group,
            out_head,
            *dquery.stride()[:2],
            *dkey.stride()[:2],
            *dvalue.stride()[:2],
            positions.stride(0),
        ),
        {
            "QUERY_HEADS": groups * per_group,
            "PER_GROUP": per_group,
            "KEY_HEADS": groups,
            "QUERY_ROWS": query_rows,
            "KEY_ROWS": key_rows,
            "HALF": dim // 2,
            "num_warps": warps,
        },
    )
    return query_parts, key_parts
