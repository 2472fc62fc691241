"""Runs of `miles bisect` as `bisect.json` holds them, made up: what its page is tested with."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_launcher.parity.page import write_page

Data = dict[str, Any]

OPS = (
    ("input_layernorm", ("input",)),
    ("qkv_proj", ("input",)),
    ("q_norm", ("input",)),
    ("k_norm", ("input",)),
    ("rope", ("input",)),
    ("rope_k", ("input",)),
    ("attention", ("query", "key", "value")),
    ("o_proj", ("input",)),
    ("post_attention_layernorm", ("input",)),
    ("gate_up_proj", ("input",)),
    ("silu_mul", ("input",)),
    ("down_proj", ("input",)),
)
HEAD_OPS = (("final_norm", ("input",)), ("lm_head", ("input",)), ("temperature", ("input",)))
FINGERPRINT = {
    "contract": "qwen3_dense_true_on_policy_v2",
    "contract_digest": "e6d05bfdb10072e194a8e9efdb4f5275d0d4200cb801e2cbbb5c7e7f06ef711c",
    "segments": 2,
    "rollout_tensor_parallel_size": 2,
    "schema_digest": "2ddb845041179549b93bb539fa56e115197ec90af8d2b9e022e184225cbcc022",
    "ops_digest": "99d7c573fc0fa3e93397525b0fe1768eed8870a99d0318735c1aac5135fd3fd3",
    "rope_digest": "a62f52d2fe0563a463ad4d65bdf2ea3abee2b9aee1fc916b63a49493a55d5324",
    "device": "cpu",
    "versions": {"torch": "2.11.0", "triton": "3.6.0"},
    "digest": "1379eae4fbab64bb98c7765c7f339b8c5530ed943d046d2cb97a67fb3fe11b46",
}


def unfinished(between: tuple[str, str] = ("rollout", "trainer")) -> Data:
    """A run whose process died before anything was compared."""
    return {
        "model": "qwen3-tiny",
        "contract": "qwen3_dense_true_on_policy_v2",
        "segments": 2,
        "device": "cpu",
        "layout": {"rollout_tp": 2, "train_tp": 2, "pp": 1, "cp": 1},
        "versions": {
            "miles-launcher": "0.1.0",
            "sglang": "0.5.17",
            "megatron-core": "0.16.1",
            "torch": "2.11.0",
        },
        "fingerprint": {side: copy.deepcopy(FINGERPRINT) for side in between},
        "seconds": {"weights": 0.001, "ray": 7.929, "roles": 89.938},
        "ended": "process died",
        "message": "trainer rank 1 died: exit code -9 (killed; out of memory?)",
        "exit_code": 4,
        "between": list(between),
    }


def places(layers: int) -> list[Data]:
    """Every tapped tensor in the order of the flow."""
    flow: list[tuple[int | None, str, str]] = [(None, "embedding", "output")]
    every = [(layer, *op) for layer in range(layers) for op in OPS]
    for layer, op, inputs in [*every, *((None, *op) for op in HEAD_OPS)]:
        flow += [(layer, op, tensor) for tensor in (*inputs, "output")]
    flow.append((None, "logprob", "output"))
    return [{"layer": layer, "op": op, "tensor": tensor} for layer, op, tensor in flow]


def equal(layers: int = 4, sequences: int = 8, length: int = 48, **more: Any) -> Data:
    """A run that came to its end and found nothing."""
    data = unfinished(**more)
    ids = [[(7 * s + 31 * p) % 500 for p in range(length)] for s in range(sequences)]
    rows = sequences * (length - 1)
    ops = [{**place, "rows": rows, "differ": 0} for place in places(layers)]
    data.update(
        ended="complete",
        exit_code=0,
        message=f"equal: {rows * len(ops)} token rows of {len(ops)} tensors compared; none differs",
        first_divergence=None,
        ops=ops,
        tokens=ids,
        prompt_lengths=[length // 3 + s % 5 for s in range(sequences)],
        heat=None,
        ulp=None,
    )
    data["seconds"].update(plain=3.205, digests=5.308, compare=0.055, rows=4.251, end=1.889)
    return data


def spread(ops: list[Data], first: Data, sequence: int, position: int, data: Data) -> None:
    """From the first place on: that token in its layer, every later one of its sequence above."""
    at = next(n for n, op in enumerate(ops) if all(op[key] == first[key] for key in first))
    layers = ["embedding", *range(max(op["layer"] or 0 for op in ops) + 1), "head"]
    tokens = [[s, p] for s, ids in enumerate(data["tokens"]) for p in range(len(ids) - 1)]
    heat = [[0] * len(layers) for _ in tokens]
    for n, op in enumerate(ops[at:], start=at):
        column = layers.index(op["layer"]) if op["layer"] is not None else len(layers) - 1
        for row, (s, p) in zip(heat, tokens, strict=True):
            # Attention carries it to later tokens, and now and then a rounding hides it.
            reach = 2 + (n - at) // 2 if n - at > 12 else 0
            if s == sequence and position <= p <= position + reach and (p * n) % 19 != 5:
                row[column] += 1
                op["differ"] += 1
    differing = [n for n, counts in enumerate(heat) if any(counts)]
    data["heat"] = {
        "layers": layers,
        "tokens": tokens,
        "rows_differ": heat,
        "elements_differ": [
            [count and min(60 * count, 2**at) + n % 5 for at, count in enumerate(heat[n])]
            if n in differing[:64]
            else None
            for n in range(len(tokens))
        ],
    }


def divergence(layer: int = 1, op: str = "gate_up_proj", position: int = 20, **more: Any) -> Data:
    """One op of one layer with another bit in one element of one token."""
    data = equal(**more)
    ours, theirs = data["between"]
    place = {"layer": layer, "op": op, "tensor": "output"}
    sequence = len(data["tokens"]) // 3
    spread(data["ops"], place, sequence, position, data)
    at = next(o for o in data["ops"] if all(o[key] == place[key] for key in place))
    source = f"{'ops'}/linear/kernel.py:matmul_persistent"
    look = {"kernel": "triton linear", "source": f"sglang_patch/{source}", "version": "3.6.0"}
    data.update(
        exit_code=3,
        message=f"first divergence: layer {layer} {op}, sequence {sequence} position {position}, "
        f"element 2419: {ours} 3f9a, {theirs} 3f9b (bfloat16, 1 ulp; 1 of 3072 elements); "
        f"{at['differ']} of {at['rows']} token rows differ there, and its inputs are equal: "
        f"{op} is at fault",
        first_divergence={
            **place,
            "side": None,
            "rank": None,
            "judged_by": None,
            "token": {
                "sequence": sequence,
                "position": position,
                "id": data["tokens"][sequence][position],
                "part": "response",
            },
            "token_rows_differ": at["differ"],
            "token_rows_compared": at["rows"],
            "inputs_equal": True,
            "inputs": [{"layer": layer, "op": op, "tensor": "input", "equal": True}],
            "bits": {ours: "3f9a", theirs: "3f9b"},
            "ulp": 1,
            "element": {
                "column": 2419,
                "dtype": "bfloat16",
                "ranks": {ours: 1, theirs: 1},
                "differ": 1,
                "of": 3072,
            },
            "look_at": {
                "policy": {"order": "segments", "num_leaves": 2, "leaf_dtype": "float32"},
                ours: look,
                theirs: {**look, "source": f"megatron_patch/{source}"},
            },
        },
        ulp={
            **place,
            "rows": 12,
            "elements": 36864,
            "differ": 161,
            "not_numbers": 1,
            "buckets": [[1, 1, 97], [2, 3, 41], [4, 7, 15], [8, 15, 0], [16, 31, 6], [32, 63, 1]],
        },
    )
    return data


def large() -> Data:
    """36 layers, 4,096 tokens: the map has 38 rows; elements are counted for some of the tokens."""
    data = divergence(layer=11, op="o_proj", layers=36, sequences=16, length=257, position=90)
    assert len(data["heat"]["tokens"]) == 4096 and len(data["heat"]["layers"]) == 38
    data["model"] = "qwen3-4b"
    data["message"] = "first divergence: layer 11 o_proj, sequence 5 position 90, element 2419"
    first = data["first_divergence"]
    first["bits"] = {"rollout": "3f9a0412", "trainer": "bf9a0412"}
    first["element"]["dtype"], first["ulp"] = "float32", 2 * 0x3F9A0412
    first["side"], first["rank"], first["judged_by"] = "trainer", 1, "reference"
    first["look_at"]["trainer"]["version"] = "3.6.1"
    data["fingerprint"]["trainer"]["versions"]["triton"] = "3.6.1"
    data["fingerprint"]["trainer"]["digest"] = "1379" + "0" * 60
    return data


def decode_prefill() -> Data:
    """Two sides of one engine, where the input of an op differs and what it is made of does not."""
    data = divergence(between=("decode", "prefill"), op="o_proj", layer=2)
    first = data["first_divergence"]
    first.update(tensor="input", inputs_equal=False, bits=None, element=None, ulp=None)
    first["inputs"] = [{"layer": 2, "op": "attention", "tensor": "output", "equal": True}]
    at = {"layer": 2, "op": "o_proj", "tensor": "input"}
    for op in data["ops"]:
        if {key: op[key] for key in at} == at:
            op["differ"] = 1
    data["message"] = (
        "first divergence: input of layer 2 o_proj, sequence 2 position 20; 1 of 376 token rows "
        "differ there, and layer 2 attention are equal: what carries them into o_proj is at fault"
    )
    data["ulp"] = None
    data["ops"] = [op for op in data["ops"] if (op["layer"], op["op"]) != (0, "rope_k")]
    return data


HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=a()>&amp;\"'\u2028\ud800"
)


def hostile() -> Data:
    """Every string that is not a key of the form could end an element, were it not escaped."""
    data = divergence()

    def poison(found: Any) -> Any:
        if isinstance(found, dict):
            return {key: poison(item) for key, item in found.items()}
        return HOSTILE if isinstance(found, str) else found

    for key in ("model", "contract", "device", "message", "versions", "fingerprint"):
        data[key] = poison(data[key])
    data["fingerprint"]["rollout"][HOSTILE] = {HOSTILE: [HOSTILE, {}]}
    data["seconds"][HOSTILE] = 1.0
    for op in data["ops"]:
        op["op"] = HOSTILE if op["op"] == "gate_up_proj" else op["op"]
    first = data["first_divergence"]
    for key in ("op", "side", "inputs", "look_at"):
        first[key] = HOSTILE if key in ("op", "side") else poison(first[key])
    first["look_at"]["policy"] = {HOSTILE: HOSTILE}
    first["token"]["part"] = data["ulp"]["op"] = HOSTILE
    return data


CASES: dict[str, Callable[[], Data]] = {
    "equal": equal,
    "divergence": divergence,
    "large": large,
    "decode-prefill": decode_prefill,
    "unfinished": unfinished,
    "hostile": hostile,
}


def pages(folder: Path, data: Data) -> Path:
    path = folder / "bisect.html"
    write_page(data, path)
    return path


def strip_states(data: Data) -> Counter[str]:
    """How many cells of each state the strip must have."""
    first = data["first_divergence"]
    keys = {(op["op"], op["tensor"]) for op in data["ops"] if op["layer"] is not None}
    layers = {op["layer"] for op in data["ops"]} - {None}
    inside = sum(op["layer"] is not None for op in data["ops"])
    counts = Counter(
        "first"
        if first and all(op[key] == first[key] for key in ("layer", "op", "tensor"))
        else "after"
        if op["differ"]
        else "equal"
        for op in data["ops"]
    )
    counts["untapped"] = len(layers) * len(keys) - inside
    return +counts
