"""One-ulp faults, so that a comparison can show that it would have noticed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LAYER_OPS = (
    "input_layernorm",
    "qkv_proj",
    "q_norm",
    "k_norm",
    "rope",
    "rope_k",
    "attention",
    "o_proj",
    "post_attention_layernorm",
    "gate_up_proj",
    "silu_mul",
    "down_proj",
)
FINAL_OPS = ("embedding", "final_norm", "lm_head", "temperature", "logprob")

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Fault:
    """Flip the last bit of one element of a row, at one place: `layer` (None: outside the
    layers), `op`, `rank` of the tensor-parallel group (None: every rank), `token` row (None: every
    row, since which rows a side scores differs between prefill, decode and a packed batch)."""

    layer: int | None
    op: str
    rank: int | None = None
    token: int | None = None


def parse_fault(text: str) -> Fault:
    """`LAYER:OP[:RANK[:TOKEN]]`, LAYER a number or `final`; `ValueError` lists the ops."""
    parts = text.split(":")
    if not 2 <= len(parts) <= 4:
        raise ValueError(f"cannot read fault {text!r}: write LAYER:OP[:RANK[:TOKEN]]")
    layer_text, op = parts[0], parts[1]
    names = FINAL_OPS if layer_text == "final" else LAYER_OPS
    if op not in names or not (layer_text == "final" or layer_text.isdecimal()):
        raise ValueError(
            f"cannot read fault {text!r}: LAYER is a number with one of {', '.join(LAYER_OPS)}, "
            f"or final with one of {', '.join(FINAL_OPS)}"
        )
    numbers: list[int | None] = []
    for part in parts[2:]:
        if not part.isdecimal():
            raise ValueError(f"cannot read fault {text!r}: {part!r} is not a number")
        numbers.append(int(part))
    numbers += [None] * (2 - len(numbers))
    layer = None if layer_text == "final" else int(layer_text)
    return Fault(layer=layer, op=op, rank=numbers[0], token=numbers[1])


def flip_one_ulp(
    fault: Fault, tensor: torch.Tensor, *, layer: int | None, op: str, rank: int
) -> torch.Tensor:
    """`tensor` [rows, ...] with the lowest bit of one element of a row flipped when this is the
    fault's place, else `tensor` itself.

    The element is the row's largest in magnitude, so that the change is not lost to a rounding of
    something larger beside it. Always a copy: the input is left alone.
    """
    place = (fault.layer, fault.op)
    here = (None if op in FINAL_OPS else layer, op)
    if place != here or (fault.rank is not None and fault.rank != rank) or not tensor.numel():
        return tensor
    rows = tensor.shape[0]
    if fault.token is not None and fault.token >= rows:
        return tensor
    out = tensor.clone(memory_format=torch.contiguous_format)
    flat = out.view(rows, -1)
    chosen = flat if fault.token is None else flat[fault.token : fault.token + 1]
    bits = chosen.view(_BITS[chosen.element_size()])
    index = chosen.to(torch.float64).abs().argmax(dim=1, keepdim=True)
    bits.scatter_(1, index, bits.gather(1, index) ^ 1)
    assert not torch.equal(out, tensor)
    return out
