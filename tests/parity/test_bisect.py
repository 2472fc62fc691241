"""`miles bisect` on the real engines: equal where nothing is wrong, and a fault named exactly.

Every run also shows that taps change no bits: a pass with taps that did not repeat the tokens and
logprobs of the pass without would end with `gate closed`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness import SMALL, Ended, run_miles

LAYER_OPS = 12
OTHER_OPS = 4


def bisect(*arguments: str, out: Path) -> tuple[Ended, dict[str, Any]]:
    ended = run_miles("bisect", "qwen3-tiny", *arguments, *SMALL, out=out)
    path = out / "bisect.json"
    assert path.is_file(), ended.explain()
    data = json.loads(path.read_text())
    assert data["ended"] == "complete", ended.explain()
    assert data["fingerprint"]["rollout"] == data["fingerprint"]["trainer"]
    assert len(data["ops"]) == 4 * LAYER_OPS + OTHER_OPS
    assert all(op["rows"] > 0 for op in data["ops"])
    return ended, data


def test_nothing_wrong_is_null_over_different_layouts_with_chunked_prefill(tmp_path: Path) -> None:
    ended, data = bisect(
        "--rollout-tp", "2", "--cp", "2", "rollout.chunked_prefill_size=32", out=tmp_path / "run"
    )
    assert ended.returncode == 0, ended.explain()
    assert data["first_divergence"] is None
    assert all(op["differ"] == 0 for op in data["ops"])
    assert "none differs" in ended.output


def test_a_fault_in_the_rollout_is_named(tmp_path: Path) -> None:
    """Row 5 of the first prefill is position 5 of the first sequence."""
    ended, data = bisect(
        "--tp", "2", "--inject-fault", "rollout:1:gate_up_proj:1:5", out=tmp_path / "run"
    )
    assert ended.returncode == 3, ended.explain()
    first = data["first_divergence"]
    assert (first["layer"], first["op"]) == (1, "gate_up_proj")
    assert first["token"] == {"sequence": 0, "position": 5}
    assert first["inputs_equal"] is True and first["ulp"] == 1
    assert first["bits"]["rollout"] != first["bits"]["trainer"]
    element = first["element"]
    assert (element["rollout_rank"], element["trainer_rank"], element["differ"]) == (1, 1, 1)
    assert element["of"] == 2 * 1536, "the whole row was compared, both shards of it"
    assert "layer 1 gate_up_proj, sequence 0 position 5" in ended.output
    assert {op["op"] for op in data["ops"][:10] if op["differ"]} == set()


def test_a_fault_in_one_trainer_rank_is_named_with_its_side(tmp_path: Path) -> None:
    ended, data = bisect(
        "--tp", "2", "--inject-fault", "trainer:2:down_proj:1:7", out=tmp_path / "run"
    )
    assert ended.returncode == 3, ended.explain()
    first = data["first_divergence"]
    assert (first["layer"], first["op"]) == (2, "down_proj")
    assert first["token"] == {"sequence": 0, "position": 7}
    assert first["inputs_equal"] is True and first["ulp"] == 1
    assert (first["side"], first["rank"]) == ("trainer", 1)
