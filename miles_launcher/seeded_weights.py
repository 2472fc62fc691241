"""Seeded weights of a profile's shape as a Hugging Face folder, written once and reused.

They let every command run without a download. Each tensor has its own generator, seeded from the
run's number and the tensor's name, so neither the order nor the cut into shards changes a value.
Norm weights are near, not at, one: unit weights would hide a norm that forgets them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .byte_tokenizer import EOS_ID, NUM_TOKENS, PAD_ID, write_byte_tokenizer
from .checkpoint import Shape, check_weights, weight_shapes
from .codec import to_data
from .profiles import ModelProfile

if TYPE_CHECKING:
    import torch

WEIGHT_STD = 0.02
NORM_STD = 0.1
MAX_SHARD_BYTES = 4 * 2**30
# Part of the folder's name: a change to what is written must not meet an old folder.
_FORMAT = 1


def seeded_folder(
    profile: ModelProfile, seed: int, environ: Mapping[str, str] = os.environ
) -> Path:
    """Where the weights of this profile and seed are kept: under $MILES_HOME or ~/.cache/miles."""
    text = json.dumps([_FORMAT, to_data(profile), seed], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    home = environ.get("MILES_HOME") or str(Path.home() / ".cache" / "miles")
    return Path(home).expanduser() / f"{profile.name}-seed{seed}-{digest}"


def ensure_seeded_weights(
    profile: ModelProfile,
    seed: int,
    folder: Path | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """The folder with the seeded weights (bf16), written now if it is not there yet.

    The folder appears under its name only when complete. Peak memory is about one shard. Raises
    `ValueError` naming the tensor where a folder is there but incomplete.
    """
    folder = folder or seeded_folder(profile, seed)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _write(temporary, profile, seed, max_shard_bytes)
            temporary.chmod(0o755)
            try:
                temporary.rename(folder)
            except OSError:
                # Another process was faster; its folder holds the same bytes.
                if not folder.is_dir():
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    check_weights(folder, profile)
    return folder


def _write(folder: Path, profile: ModelProfile, seed: int, max_shard_bytes: int) -> None:
    from safetensors.torch import save_file

    shards = _shards(weight_shapes(profile), max_shard_bytes)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate(shards, start=1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {key: seeded_tensor(key, shape, seed) for key, shape in shapes.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", hf_config(profile))
    _write_json(
        folder / "generation_config.json",
        {"do_sample": True, "temperature": 1.0, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID},
    )
    if profile.vocab_size >= NUM_TOKENS:
        write_byte_tokenizer(folder, profile.max_position_embeddings)


def seeded_tensor(name: str, shape: Shape, seed: int) -> torch.Tensor:
    """One bf16 tensor of `shape`, drawn in fp32 from a generator of its own."""
    import torch

    number = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
    generator = torch.Generator().manual_seed(number & (2**63 - 1))
    values = torch.empty(shape, dtype=torch.float32).normal_(generator=generator)
    # In place: at the largest shape the fp32 draft alone is 3 GiB.
    if len(shape) == 1:
        values.mul_(NORM_STD).add_(1.0)
    else:
        values.mul_(WEIGHT_STD)
    return values.to(torch.bfloat16)


def _shards(shapes: dict[str, Shape], max_bytes: int) -> list[dict[str, Shape]]:
    shards: list[dict[str, Shape]] = [{}]
    used = 0
    for name, shape in shapes.items():
        size = 2
        for dim in shape:
            size *= dim
        if shards[-1] and used + size > max_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = shape
        used += size
    return shards


def hf_config(profile: ModelProfile) -> dict[str, object]:
    """`config.json` of a profile, as transformers and SGLang read it."""
    return {
        "architectures": [profile.architecture],
        "model_type": profile.model_type,
        "hidden_act": "silu",
        "hidden_size": profile.hidden_size,
        "num_hidden_layers": profile.num_hidden_layers,
        "num_attention_heads": profile.num_attention_heads,
        "num_key_value_heads": profile.num_key_value_heads,
        "head_dim": profile.head_dim,
        "intermediate_size": profile.intermediate_size,
        "vocab_size": profile.vocab_size,
        "max_position_embeddings": profile.max_position_embeddings,
        "rms_norm_eps": profile.rms_norm_eps,
        # Both spellings: transformers 5 reads rope_parameters, older readers rope_theta.
        "rope_theta": profile.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": profile.rope_theta},
        "tie_word_embeddings": profile.tie_word_embeddings,
        "attention_bias": profile.attention_bias,
        "attention_dropout": 0.0,
        "initializer_range": WEIGHT_STD,
        "use_sliding_window": False,
        "use_cache": True,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def _write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
