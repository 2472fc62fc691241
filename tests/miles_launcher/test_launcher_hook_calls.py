"""How often the hooks must have run, with the head norms and the rotation fused or one by one."""

from __future__ import annotations

from typing import Any

import pytest

from miles_launcher.parity.gate import GateClosed, check_hook_calls

LAYERS, FORWARDS = 3, 5


def calls(fused: int, **changed: int) -> list[dict[str, Any]]:
    """One rank's counts after `FORWARDS` passes, of which `fused` took the fused op."""
    apart = FORWARDS - fused
    counted = {
        "embedding": FORWARDS,
        "lm_head": FORWARDS,
        "sampler": 1,
        "linear": 2 * LAYERS * FORWARDS,
        "row_linear": 2 * LAYERS * FORWARDS,
        "attention": LAYERS * FORWARDS,
        "silu_mul": LAYERS * FORWARDS,
        "rope": LAYERS * apart,
        "rms_norm": (2 * LAYERS + 1) * FORWARDS + 2 * LAYERS * apart,
        "qk_norm_rope": LAYERS * fused,
    }
    return [{"calls": counted | changed, "num_layers": LAYERS}]


@pytest.mark.parametrize("fused", [0, 2, FORWARDS])
def test_a_fused_pass_counts_as_its_norms_and_its_rotation(fused: int) -> None:
    check_hook_calls(calls(fused), qk_layernorm=True, attention_ours=False)


@pytest.mark.parametrize("fused", [0, FORWARDS])
def test_a_layer_that_went_around_or_twice_is_seen(fused: int) -> None:
    for more in (-1, 1):
        wrong = calls(fused, qk_norm_rope=LAYERS * fused + more)
        with pytest.raises(GateClosed, match="rope 1[46] times, expected 15"):
            check_hook_calls(wrong, qk_layernorm=True, attention_ours=False)
    norms = (2 * LAYERS + 1) * FORWARDS
    with pytest.raises(GateClosed, match="rms_norm"):
        check_hook_calls(
            calls(FORWARDS, rms_norm=norms + 1), qk_layernorm=True, attention_ours=False
        )


def test_a_model_without_head_norms_has_no_fused_pass() -> None:
    plain = calls(0, rms_norm=(2 * LAYERS + 1) * FORWARDS)
    check_hook_calls(plain, qk_layernorm=False, attention_ours=False)
    instead = calls(FORWARDS, rms_norm=(2 * LAYERS + 1) * FORWARDS)
    with pytest.raises(GateClosed, match="rope 0 times, expected 15"):
        check_hook_calls(instead, qk_layernorm=False, attention_ours=False)
