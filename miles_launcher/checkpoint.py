"""What a Hugging Face folder must hold for a profile, checked from safetensors headers alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path

from .profiles import ModelProfile

Shape = tuple[int, ...]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = frozenset({"BF16", "F16", "F32"})
_MAX_HEADER_BYTES = 100 * 2**20  # the safetensors format's own limit
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_SHOWN = 8


class WeightsError(ValueError):
    """Unreadable or incomplete weights; `problems` names every file or tensor concerned."""

    def __init__(self, folder: Path, problems: list[str]) -> None:
        self.problems = tuple(problems)
        shown = "; ".join(problems[:_SHOWN])
        rest = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        super().__init__(f"{folder}: {shown}{rest}")


def weight_shapes(profile: ModelProfile) -> dict[str, Shape]:
    """Every tensor of the checkpoint, name -> shape (rows, columns), in the order of the layers.

    Raises `ValueError` for a family whose tensors are not described here.
    """
    if profile.family != "qwen3_dense" or profile.attention_bias:
        raise ValueError(
            f"{profile.name}: the tensors of family {profile.family} "
            f"(attention_bias={profile.attention_bias}) are not described; "
            "only qwen3_dense without bias is"
        )
    hidden, width = profile.hidden_size, profile.intermediate_size
    queries = profile.num_attention_heads * profile.head_dim
    keys = profile.num_key_value_heads * profile.head_dim
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (profile.vocab_size, hidden)}
    for index in range(profile.num_hidden_layers):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.q_norm.weight": (profile.head_dim,),
            f"{layer}.self_attn.k_norm.weight": (profile.head_dim,),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (width, hidden),
            f"{layer}.mlp.up_proj.weight": (width, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, width),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not profile.tie_word_embeddings:
        shapes["lm_head.weight"] = (profile.vocab_size, hidden)
    return shapes


def check_weights(folder: Path, profile: ModelProfile) -> None:
    """Raise `WeightsError` unless the folder holds exactly the profile's tensors, whole.

    Reads headers only. A tied checkpoint may carry a copy of its head, as published ones do.
    """
    problems: list[str] = []
    found: dict[str, tuple[str, Shape]] = {}
    for path in _weight_files(folder, problems):
        found.update(_read_header(path, problems))
    wanted = weight_shapes(profile)
    optional = {"lm_head.weight": wanted["model.embed_tokens.weight"]}
    for name, shape in wanted.items():
        if name not in found:
            problems.append(f"missing tensor {name}, expected shape {list(shape)}")
    for name, (dtype, shape) in found.items():
        expected = wanted.get(name) or optional.get(name)
        if expected is None:
            problems.append(f"unexpected tensor {name} {list(shape)}")
        elif shape != expected:
            problems.append(f"tensor {name} has shape {list(shape)}, expected {list(expected)}")
        elif dtype not in _DTYPES:
            problems.append(
                f"tensor {name} is {dtype}, expected one of {', '.join(sorted(_DTYPES))}"
            )
    if problems:
        raise WeightsError(folder, problems)


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file in which each tensor of a folder lies. Raises `WeightsError` where one cannot be
    read."""
    problems: list[str] = []
    files = {
        name: path
        for path in _weight_files(folder, problems)
        for name in _read_header(path, problems)
    }
    if problems:
        raise WeightsError(folder, problems)
    return files


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder can turn text into tokens."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def _weight_files(folder: Path, problems: list[str]) -> Iterable[Path]:
    index = folder / _INDEX
    if not index.is_file():
        if (folder / _SINGLE).is_file():
            return [folder / _SINGLE]
        problems.append(f"no {_SINGLE} and no {_INDEX}")
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        problems.append(f"{_INDEX} cannot be read: {error!r}")
        return []
    absent = [name for name in names if not (folder / name).is_file()]
    problems.extend(f"{name} is listed in {_INDEX} but missing" for name in absent)
    return [folder / name for name in names if name not in absent]


def _read_header(path: Path, problems: list[str]) -> dict[str, tuple[str, Shape]]:
    """`{tensor: (dtype, shape)}` of one file; damage adds a problem and gives what can be read."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length > min(size - 8, _MAX_HEADER_BYTES):
                problems.append(f"{path.name} is truncated or no safetensors file ({size} bytes)")
                return {}
            header = json.loads(file.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = 8 + length + max((int(t["data_offsets"][1]) for t in tensors.values()), default=0)
        found = {n: (str(t["dtype"]), tuple(map(int, t["shape"]))) for n, t in tensors.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        problems.append(f"{path.name} has an unreadable header: {error!r}")
        return {}
    if end != size:
        cut = [n for n, t in tensors.items() if 8 + length + int(t["data_offsets"][1]) > size]
        what = f"its tensors end at byte {end}" + (f"; cut: {', '.join(cut[:3])}" if cut else "")
        problems.append(f"{path.name} is {size} bytes but {what}")
    return found
