"""One typed `ModelProfile` per model name: the shape that both engines must agree on.

Field names are those of a Hugging Face `config.json`. A new model is one new entry here and one
file under `conf/model`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType

from .codec import from_data


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """The shape of one checkpoint. Sizes are element counts; `head_dim` is given, not derived.

    `family` is what a contract covers (`schema.TrueOnPolicyContract.families`); `architecture`
    and `model_type` are what `config.json` says.
    """

    name: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    tie_word_embeddings: bool
    vocab_size: int = 151936
    max_position_embeddings: int = 40960
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    qk_layernorm: bool = True
    family: str = "qwen3_dense"
    architecture: str = "Qwen3ForCausalLM"
    model_type: str = "qwen3"

    @property
    def row_parallel_layers(self) -> tuple[tuple[str, int], ...]:
        """`(layer, K)` of every linear whose global K tensor parallelism cuts."""
        return (
            ("o_proj", self.num_attention_heads * self.head_dim),
            ("down_proj", self.intermediate_size),
        )

    @property
    def num_parameters(self) -> int:
        """Elements in the checkpoint of a dense model, a tied head counted once."""
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys) + 2 * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        tables = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        layer = attention + mlp + 2 * self.hidden_size
        return tables + self.num_hidden_layers * layer + self.hidden_size


_ALL = (
    # Small, but able to fail: several KV heads, 12 K tiles in down_proj (runs of 3, so a plain
    # tree gives other bits), and 500 rows of vocabulary, which TP=2 and TP=4 have to pad.
    ModelProfile(
        name="qwen3-tiny",
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=500,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    ),
    ModelProfile(
        name="qwen3-0.6b",
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
    ),
    ModelProfile(
        name="qwen3-1.7b",
        hidden_size=2048,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=6144,
        tie_word_embeddings=True,
    ),
    ModelProfile(
        name="qwen3-4b",
        hidden_size=2560,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=9728,
        tie_word_embeddings=True,
    ),
    ModelProfile(
        name="qwen3-8b",
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        tie_word_embeddings=False,
    ),
    ModelProfile(
        name="qwen3-14b",
        hidden_size=5120,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=17408,
        tie_word_embeddings=False,
    ),
    ModelProfile(
        name="qwen3-32b",
        hidden_size=5120,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=25600,
        tie_word_embeddings=False,
    ),
    # Known by name so that it is refused for the right reason: no contract covers its family yet.
    ModelProfile(
        name="qwen3-30b-a3b",
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=6144,
        tie_word_embeddings=False,
        family="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
    ),
)

PROFILES: Mapping[str, ModelProfile] = MappingProxyType({p.name: p for p in _ALL})


def canonical_name(name: str) -> str:
    """The registry's spelling of a name as people type it: `Qwen/Qwen3-4B` is `qwen3-4b`."""
    return name.strip().lower().removeprefix("qwen/").replace("_", "-")


def get_profile(name: str) -> ModelProfile:
    """The profile called `name`, in any case; `ValueError` names the nearest and the choices."""
    key = canonical_name(name)
    if key in PROFILES:
        return PROFILES[key]
    near = difflib.get_close_matches(key, PROFILES, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"unknown model {name!r}{hint} (choices: {', '.join(PROFILES)})")


# Read from config.json where they are written there, else these values, as the Hugging Face
# classes of these model types define them.
_HF_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {"attention_bias": False, "tie_word_embeddings": False}
)
_PLAIN_ROPE = (None, "default")
_FAMILIES: Mapping[str, str] = MappingProxyType({"qwen3": "qwen3_dense", "qwen3_moe": "qwen3_moe"})


def profile_from_hf_config(folder: Path) -> ModelProfile:
    """Read the profile that a Hugging Face folder's `config.json` describes.

    Its `name` is the folder's. Raises `ValueError` naming the file and the field where the file
    is missing, unreadable, of an unknown model type, or says something that no profile can (a
    scaled RoPE, a sliding window, quantised weights).
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path}: cannot read it ({error.strerror}); is this a model folder?"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(config).__name__}")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise ValueError(
            f"{path}: model_type={model_type!r} has no profile (known: {', '.join(_FAMILIES)})"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) not in _PLAIN_ROPE:
        raise ValueError(f"{path}: scaled RoPE {rope!r} is not covered; use an unscaled checkpoint")
    if config.get("use_sliding_window"):
        raise ValueError(f"{path}: use_sliding_window=true is not covered by any contract")
    if config.get("quantization_config"):
        raise ValueError(f"{path}: quantised weights are not covered; use the bf16 checkpoint")
    architectures = config.get("architectures")
    found = {
        **_HF_DEFAULTS,
        "rope_theta": rope.get("rope_theta"),
        **config,
        "name": folder.name,
        "family": _FAMILIES[model_type],
        "architecture": architectures[0] if isinstance(architectures, list) else None,
        "qk_layernorm": True,
    }
    values = {field.name: found.get(field.name) for field in fields(ModelProfile)}
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise ValueError(f"{path}: missing {', '.join(missing)}")
    return from_data(ModelProfile, values, str(path))


def check_same_shape(profile: ModelProfile, folder: Path) -> None:
    """Raise `ValueError` listing every field in which `folder` is not the named profile."""
    found, wanted = asdict(profile_from_hf_config(folder)), asdict(profile)
    different = [
        f"{key}: {found[key]!r} in the folder, {wanted[key]!r} in {profile.name}"
        for key in wanted
        if key != "name" and found[key] != wanted[key]
    ]
    if different:
        raise ValueError(
            f"{folder / 'config.json'} is not {profile.name}; "
            + "; ".join(different)
            + ". Give the folder of this model, or add a profile for that one to profiles.py"
        )
