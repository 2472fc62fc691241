"""Seeded weights: reproducible bits, complete or absent, with a tokenizer that takes any text."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path

import pytest

from miles_launcher import seeded_weights
from miles_launcher.checkpoint import WeightsError, check_weights, weight_shapes
from miles_launcher.profiles import check_same_shape, get_profile
from miles_launcher.seeded_weights import ensure_seeded_weights, seeded_folder, seeded_tensor

TINY = get_profile("qwen3-tiny")


def _tensors(folder: Path) -> dict[str, bytes]:
    """Tensor name -> its bytes, over all files, read without torch."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                found[name] = data[8 + length + start : 8 + length + stop]
    return found


def test_sharding_changes_no_bit(tiny_folder: Path, tmp_path: Path) -> None:
    sharded = ensure_seeded_weights(TINY, 0, tmp_path / "sharded", max_shard_bytes=2_000_000)
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert _tensors(sharded) == _tensors(tiny_folder)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * TINY.num_parameters
    assert set(index["weight_map"]) == set(weight_shapes(TINY))


def test_seed_and_name_choose_the_values(tiny_folder: Path, tmp_path: Path) -> None:
    other = _tensors(ensure_seeded_weights(TINY, 1, tmp_path / "other"))
    mine = _tensors(tiny_folder)
    assert all(other[name] != mine[name] for name in mine)
    assert mine["model.layers.0.mlp.up_proj.weight"] != mine["model.layers.0.mlp.gate_proj.weight"]
    digest = hashlib.sha256(mine["model.layers.2.self_attn.k_norm.weight"]).hexdigest()
    again = seeded_tensor("model.layers.2.self_attn.k_norm.weight", (64,), 0)
    import torch

    assert hashlib.sha256(again.view(torch.int16).numpy().tobytes()).hexdigest() == digest


def test_statistics() -> None:
    import torch

    matrix = seeded_tensor("model.layers.0.mlp.up_proj.weight", (1536, 256), 0)
    norm = seeded_tensor("model.norm.weight", (4096,), 0)
    assert matrix.dtype == norm.dtype == torch.bfloat16
    assert matrix.float().std().item() == pytest.approx(0.02, rel=0.02)
    assert norm.float().mean().item() == pytest.approx(1.0, abs=0.01)
    assert norm.float().std().item() == pytest.approx(0.1, rel=0.05)


def test_folder_is_a_checkpoint_of_the_profile(tiny_folder: Path) -> None:
    check_same_shape(TINY, tiny_folder)
    check_weights(tiny_folder, TINY)
    assert "lm_head.weight" not in _tensors(tiny_folder)
    assert "lm_head.weight" in weight_shapes(get_profile("qwen3-8b"))


def test_written_once_and_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_HOME", str(tmp_path))
    folder = ensure_seeded_weights(TINY, 3)
    assert folder == seeded_folder(TINY, 3) and folder.parent == tmp_path
    before = (folder / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(seeded_weights, "_write", None)
    assert ensure_seeded_weights(TINY, 3) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert seeded_folder(TINY, 4) != folder
    assert seeded_folder(get_profile("qwen3-4b"), 3).name.startswith("qwen3-4b-seed3-")


def test_interrupted_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(folder: Path, *arguments: object) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(seeded_weights, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure_seeded_weights(TINY, 0, tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_race_keeps_the_first(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "tiny"

    def overtaken(folder: Path, *arguments: object) -> None:
        shutil.copytree(tiny_folder, target)
        (folder / "model.safetensors").write_bytes(b"late")

    monkeypatch.setattr(seeded_weights, "_write", overtaken)
    assert ensure_seeded_weights(TINY, 0, target) == target
    assert _tensors(target) == _tensors(tiny_folder)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_tokenizer_round_trip(tiny_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    texts = [
        "plain",
        "  two  spaces, a tab\t, \r\n and a trailing newline\n",
        "h\u00e9llo \u6f22\u5b57 \U0001f642 \u0000 \u007f \u00a0",
        "".join(chr(code) for code in range(0x20, 0x250)),
    ]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, 256)
    assert tokenizer.encode("<|im_end|>") == [258]
    # Rows of the vocabulary beyond the tokens decode to nothing instead of raising.
    assert tokenizer.decode([104, 300, 105, 499]) == "hi"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def _rewrite(folder: Path, edit: object) -> None:
    """Apply `edit` to the header of the folder's file and write it back with the same data."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    edit(header)  # type: ignore[operator]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.fixture
def damaged(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "damaged"))


def test_missing_unexpected_and_misshapen_tensors_are_named(damaged: Path) -> None:
    def edit(header: dict[str, dict[str, object]]) -> None:
        header["model.layers.9.extra"] = header.pop("model.layers.1.self_attn.q_norm.weight")
        header["model.norm.weight"]["shape"] = [128, 2]
        header["model.embed_tokens.weight"]["dtype"] = "I16"

    _rewrite(damaged, edit)
    with pytest.raises(WeightsError) as caught:
        check_weights(damaged, TINY)
    assert sorted(caught.value.problems) == [
        "missing tensor model.layers.1.self_attn.q_norm.weight, expected shape [64]",
        "tensor model.embed_tokens.weight is I16, expected one of BF16, F16, F32",
        "tensor model.norm.weight has shape [128, 2], expected [256]",
        "unexpected tensor model.layers.9.extra [64]",
    ]


def test_tied_checkpoint_may_carry_its_head(damaged: Path) -> None:
    def edit(header: dict[str, dict[str, object]]) -> None:
        header["lm_head.weight"] = header["model.embed_tokens.weight"]

    _rewrite(damaged, edit)
    check_weights(damaged, TINY)


@pytest.mark.parametrize(
    ("keep", "complaint"),
    [(4, "truncated"), (1000, "truncated"), (-10, "model.safetensors is .* bytes but .* end at")],
)
def test_truncated_files(damaged: Path, keep: int, complaint: str) -> None:
    path = damaged / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=complaint):
        check_weights(damaged, TINY)


def test_truncation_names_the_tensor(damaged: Path) -> None:
    path = damaged / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=r"cut: model\."):
        check_weights(damaged, TINY)


def test_incomplete_shards(tmp_path: Path) -> None:
    folder = ensure_seeded_weights(TINY, 0, tmp_path / "s", max_shard_bytes=4_000_000)
    (folder / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(WeightsError) as caught:
        check_weights(folder, TINY)
    text = str(caught.value)
    assert "model-00002-of-00004.safetensors is listed in model.safetensors.index.json" in text
    assert "missing tensor model.layers." in text
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightsError, match="index.json cannot be read"):
        check_weights(folder, TINY)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no model.safetensors and no .*index.json.* and "):
        check_weights(tmp_path, TINY)


def test_an_incomplete_seeded_folder_is_not_used(damaged: Path) -> None:
    (damaged / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="missing tensor model.embed_tokens.weight"):
        ensure_seeded_weights(TINY, 0, damaged)


def test_families_without_a_description_are_refused() -> None:
    with pytest.raises(ValueError, match="family qwen3_moe .* not described"):
        weight_shapes(get_profile("qwen3-30b-a3b"))
