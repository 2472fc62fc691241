"""Names as people type them, shapes as published, and config.json read against a profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_launcher.conf import CONF_DIR
from miles_launcher.profiles import (
    PROFILES,
    check_same_shape,
    get_profile,
    profile_from_hf_config,
)
from miles_launcher.seeded_weights import hf_config

# hidden, layers, heads, KV heads, head_dim, mlp, tied: as in the published config.json files
PUBLISHED = {
    "qwen3-0.6b": (1024, 28, 16, 8, 128, 3072, True),
    "qwen3-1.7b": (2048, 28, 16, 8, 128, 6144, True),
    "qwen3-4b": (2560, 36, 32, 8, 128, 9728, True),
    "qwen3-8b": (4096, 36, 32, 8, 128, 12288, False),
    "qwen3-14b": (5120, 40, 40, 8, 128, 17408, False),
    "qwen3-32b": (5120, 64, 64, 8, 128, 25600, False),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shape(name: str) -> None:
    p = get_profile(name)
    assert PUBLISHED[name] == (
        p.hidden_size,
        p.num_hidden_layers,
        p.num_attention_heads,
        p.num_key_value_heads,
        p.head_dim,
        p.intermediate_size,
        p.tie_word_embeddings,
    )
    assert (p.vocab_size, p.max_position_embeddings) == (151936, 40960)
    assert (p.rope_theta, p.rms_norm_eps) == (1e6, 1e-6)


def test_parameter_counts_are_the_names() -> None:
    billions = {name: get_profile(name).num_parameters / 1e9 for name in PUBLISHED}
    assert billions == pytest.approx(
        {
            "qwen3-0.6b": 0.596,
            "qwen3-1.7b": 1.72,
            "qwen3-4b": 4.02,
            "qwen3-8b": 8.19,
            "qwen3-14b": 14.77,
            "qwen3-32b": 32.76,
        },
        rel=2e-3,
    )


def test_tiny_can_fail() -> None:
    """down_proj has 12 tiles in runs of 3, several KV heads, a vocabulary that needs padding."""
    tiny = get_profile("qwen3-tiny")
    assert dict(tiny.row_parallel_layers)["down_proj"] == 12 * 128
    assert 1 < tiny.num_key_value_heads < tiny.num_attention_heads
    assert tiny.vocab_size % 64 != 0
    assert tiny.vocab_size > 256 + 3


@pytest.mark.parametrize(
    "typed", ["Qwen/Qwen3-4B", "Qwen3-4B", "qwen3_4b", "QWEN3-4b", "qwen3-4b", " qwen3-4b "]
)
def test_names_as_typed(typed: str) -> None:
    assert get_profile(typed).name == "qwen3-4b"


def test_unknown_name_lists_choices_and_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean qwen3-4b") as caught:
        get_profile("qwen3-4bb")
    assert all(name in str(caught.value) for name in PROFILES)
    # Another organisation's model of the same name is another model.
    with pytest.raises(ValueError, match="unknown model"):
        get_profile("someone/qwen3-4b")


def test_every_profile_has_its_yaml_and_the_reverse() -> None:
    assert {path.stem for path in (CONF_DIR / "model").glob("*.yaml")} == set(PROFILES)


def _write_config(folder: Path, **changes: object) -> Path:
    config = {**hf_config(get_profile("qwen3-4b")), **changes}
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_config_json_round_trip(tmp_path: Path) -> None:
    check_same_shape(get_profile("qwen3-4b"), _write_config(tmp_path))
    # Older files have rope_theta alone and no attention_bias.
    check_same_shape(
        get_profile("qwen3-4b"),
        _write_config(tmp_path, rope_parameters=..., attention_bias=..., rope_scaling=None),
    )


def test_every_differing_field_is_listed(tmp_path: Path) -> None:
    folder = _write_config(tmp_path, hidden_size=2048, num_hidden_layers=28, rms_norm_eps=1e-5)
    with pytest.raises(ValueError, match="is not qwen3-4b") as caught:
        check_same_shape(get_profile("qwen3-4b"), folder)
    message = str(caught.value)
    for part in ("hidden_size: 2048", "2560 in qwen3-4b", "num_hidden_layers: 28", "rms_norm_eps"):
        assert part in message
    assert "head_dim" not in message


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"head_dim": ...}, "missing head_dim"),
        ({"architectures": ...}, "missing architecture"),
        ({"hidden_size": "2560"}, "hidden_size: expected int"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "scaled RoPE"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_config_json_refused(tmp_path: Path, changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        profile_from_hf_config(_write_config(tmp_path, **changes))


def test_config_json_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is this a model folder"):
        profile_from_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        profile_from_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object"):
        profile_from_hf_config(tmp_path)
