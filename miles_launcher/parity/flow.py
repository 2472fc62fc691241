"""The data flow of one token: every tapped tensor in order, and what each is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..faults import FINAL, FINAL_OPS, LAYER_OPS

OUTPUT = "output"
# Rows of these exist where a token is scored; rows of all others wherever one is computed.
SCORED_OPS = frozenset({"lm_head", "temperature", "logprob"})
_QK_NORMS = frozenset({"q_norm", "k_norm"})

# The tensors that enter an op, each with the ops of the same layer whose results it is made of.
INPUTS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "input_layernorm": {"input": ()},
        "qkv_proj": {"input": ("input_layernorm",)},
        "q_norm": {"input": ("qkv_proj",)},
        "k_norm": {"input": ("qkv_proj",)},
        "rope": {"input": ("q_norm",)},
        "rope_k": {"input": ("k_norm",)},
        "attention": {"query": ("rope",), "key": ("rope_k",), "value": ("qkv_proj",)},
        "o_proj": {"input": ("attention",)},
        "post_attention_layernorm": {"input": ("o_proj",)},
        "gate_up_proj": {"input": ("post_attention_layernorm",)},
        "silu_mul": {"input": ("gate_up_proj",)},
        "down_proj": {"input": ("silu_mul",)},
        "final_norm": {"input": ()},
        "lm_head": {"input": ("final_norm",)},
        "temperature": {"input": ("lm_head",)},
    }
)


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of an op in a layer: its output, or one that enters it. `layer` is None outside the
    layers."""

    layer: int | None
    op: str
    tensor: str = OUTPUT

    @property
    def tap(self) -> str:
        """The name in a rank's record."""
        return f"{FINAL if self.layer is None else self.layer}.{self.op}.{self.tensor}"

    @property
    def is_output(self) -> bool:
        return self.tensor == OUTPUT

    def __str__(self) -> str:
        op = self.op if self.layer is None else f"layer {self.layer} {self.op}"
        return op if self.is_output else f"{self.tensor} of {op}"

    def data(self) -> dict[str, int | str | None]:
        """As JSON."""
        return {"layer": self.layer, "op": self.op, "tensor": self.tensor}


def data_flow(num_layers: int, qk_layernorm: bool) -> tuple[Place, ...]:
    """Every tapped tensor in the order in which a token passes them."""
    ops = [
        (layer, op)
        for layer in range(num_layers)
        for op in LAYER_OPS
        if qk_layernorm or op not in _QK_NORMS
    ]
    flow = [Place(None, "embedding")]
    for layer, op in [*ops, *((None, op) for op in FINAL_OPS if op != "embedding")]:
        flow += [Place(layer, op, tensor) for tensor in INPUTS.get(op, {})]
        flow.append(Place(layer, op))
    return tuple(flow)


def inputs_of(place: Place) -> tuple[Place, ...]:
    """The tapped tensors that enter the op of an output."""
    assert place.is_output, place
    if place.op == "logprob":
        # One op on both sides, from the scaled logits on.
        return (Place(None, "temperature"),)
    return tuple(Place(place.layer, place.op, tensor) for tensor in INPUTS.get(place.op, {}))


def made_of(place: Place, num_layers: int, qk_layernorm: bool) -> tuple[Place, ...]:
    """The tapped tensors that an input is made of: copied, exchanged between ranks, or (the
    residual stream) added."""
    assert not place.is_output, place
    layer, op = place.layer, place.op
    if op in ("input_layernorm", "final_norm"):
        before = num_layers - 1 if layer is None else layer - 1
        if before < 0:
            return (Place(None, "embedding"),)
        return (
            Place(before, "down_proj"),
            Place(before, "post_attention_layernorm", "input"),
        )
    sources = [Place(layer, source) for source in INPUTS[op][place.tensor]]
    if op == "post_attention_layernorm":
        sources.append(Place(layer, "input_layernorm", "input"))
    if not qk_layernorm:
        sources = [Place(layer, "qkv_proj") if s.op in _QK_NORMS else s for s in sources]
    return tuple(sources)
