"""The layout of Hugging Face tensors over ranks, and reading, writing and hashing them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_models import SHAPES, V1, V2, weights
from safetensors.torch import load_file, save_file

from megatron_patch.checkpoint import hf_folder_digest
from megatron_patch.hf_layout import RankPlace, blocks, hf_tensors
from megatron_patch.ops.digest import shard_digest, weights_digest
from megatron_patch.schema import padded_vocabulary

PLACES = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2)]


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        (n, tp, pp)
        for n, s in SHAPES.items()
        for tp, pp in PLACES
        if s.num_attention_heads % tp == 0
    ],
)
def test_every_element_is_counted_by_exactly_one_rank(name: str, tp: int, pp: int) -> None:
    shape = SHAPES[name]
    padded = padded_vocabulary(V2, shape.vocab_size)
    counts = {k: np.zeros(v, np.int32) for k, v in hf_tensors(shape).items()}
    for tp_rank in range(tp):
        for pp_rank in range(pp):
            place = RankPlace(tp_rank, tp, pp_rank, pp)
            local: dict[str, int] = {}
            for block in blocks(shape, place, padded):
                assert block.local_rows[1] - block.local_rows[0] == block.size[0]
                # Blocks of a parameter follow each other without a gap.
                assert block.local_rows[0] == local.get(block.parameter, 0)
                local[block.parameter] = block.local_rows[1]
                if block.counted:
                    rows = slice(*block.rows)
                    where = rows if block.columns is None else (rows, slice(*block.columns))
                    counts[block.name][where] += 1
    assert all((c == 1).all() for c in counts.values())


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_vocabulary_shards_are_whole_segments(tp: int) -> None:
    for vocab in (1, 130, 500, 512, 513, 151936):
        for contract in (V1, V2):
            padded = padded_vocabulary(contract, vocab)
            assert padded >= vocab
            assert padded % (64 * 8) == 0
            assert padded % tp == 0


@pytest.mark.parametrize("name", ["small", "untied", "bias", "shared_kv"])
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 1), (4, 1, 1), (2, 1, 2)])
def test_load_save_round_trip_and_digest(ranks, model_folder, tmp_path, name, layout) -> None:
    """What a sharded trainer loads, it writes back bit for bit, and both digests are equal."""
    source = model_folder(name)
    saved = tmp_path / "saved"
    world = layout[0] * layout[1] * layout[2]
    results = ranks.run(world, "load_and_save", str(source), name, layout, str(saved))
    wanted = hf_folder_digest(source, SHAPES[name])
    assert {r["digest"] for r in results} == {wanted}
    ours, theirs = load_file(saved / "model.safetensors"), load_file(source / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(ours[key].view(torch.int16), value.view(torch.int16)), key
    assert (saved / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert all("already holds weights" in r["second_save"] for r in results)


def test_digest_sees_one_ulp_a_swap_and_a_name(tmp_path: Path) -> None:
    shape = SHAPES["small"]
    digests = set()
    for change in ("none", "ulp", "swap", "name"):
        tensors = weights("small")
        key = "model.layers.1.mlp.down_proj.weight"
        if change == "ulp":
            tensors[key].view(torch.int16)[3, 5] ^= 1
        elif change == "swap":
            tensors[key][[0, 1]] = tensors[key][[1, 0]]
        elif change == "name":
            other = "model.layers.0.mlp.down_proj.weight"
            tensors[key], tensors[other] = tensors[other], tensors[key]
        folder = tmp_path / change
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        digests.add(hf_folder_digest(folder, shape))
    assert len(digests) == 4


def test_folder_digest_is_the_sum_over_any_shards(model_folder) -> None:
    sums = {}
    for key, value in weights("small").items():
        width = value[0].numel() if value.dim() == 2 else 1
        half = value.shape[0] // 2
        sums[key] = shard_digest(value[:half], (0, half), (0, width)) + shard_digest(
            value[half:], (half, value.shape[0]), (0, width)
        )
    assert weights_digest(sums) == hf_folder_digest(model_folder("small"), SHAPES["small"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "model.layers.1.self_attn.k_proj.weight is missing"),
        ("shape", r"model.layers.1.self_attn.k_proj.weight is BF16 \(3, 4\), the model needs BF16"),
        ("dtype", "model.layers.1.self_attn.k_proj.weight is F32"),
        ("garbage", "not a readable safetensors file"),
        ("empty", "no .*safetensors file"),
    ],
)
def test_bad_weights_name_the_tensor(ranks, tmp_path, change: str, message: str) -> None:
    key = "model.layers.1.self_attn.k_proj.weight"
    tensors = weights("small")
    if change == "missing":
        del tensors[key]
    elif change == "shape":
        tensors[key] = torch.zeros(3, 4, dtype=torch.bfloat16)
    elif change == "dtype":
        tensors[key] = tensors[key].float()
    if change == "garbage":
        (tmp_path / "model.safetensors").write_bytes(b"not a tensor file at all")
    elif change != "empty":
        save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        hf_folder_digest(tmp_path, SHAPES["small"])
    (error,) = ranks.run(1, "load_error", str(tmp_path), "small")
    assert error is not None
    assert re.search(message, error)


def test_several_files_with_an_index(tmp_path: Path, model_folder) -> None:
    tensors = list(weights("small").items())
    halves = {"a.safetensors": dict(tensors[:9]), "b.safetensors": dict(tensors[9:])}
    for file, part in halves.items():
        save_file(part, tmp_path / file)
    index = {"weight_map": {k: file for file, part in halves.items() for k in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shape = SHAPES["small"]
    assert hf_folder_digest(tmp_path, shape) == hf_folder_digest(model_folder("small"), shape)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match="b.safetensors .holds model.layers"):
        hf_folder_digest(tmp_path, shape)
