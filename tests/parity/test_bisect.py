"""`miles bisect` on the real engines: equal where nothing is wrong, and a fault named exactly.

Every run also shows that taps change no bits: a pass with taps that did not repeat the tokens and
logprobs of the pass without would end with `gate closed`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import REPOSITORY, SMALL, Ended, run_miles

from miles_launcher.parity.flow import data_flow

NUM_LAYERS = 4
FLOW = data_flow(NUM_LAYERS, qk_layernorm=True)
CODE_FAULTS = Path(__file__).parent / "code_faults"
# Four short prompts: a sweep runs this batch a hundred times.
PROMPTS = [[11, 12, 13, 14, 15], [21, 22, 23, 24], [31, 32, 33, 34, 35, 36], [41, 42, 43, 44, 45]]
SHORT = ("run.prompts_per_step=4", "run.samples_per_prompt=1", "run.max_new_tokens=2")


def with_fault(name: str, folder: Path) -> dict[str, str]:
    """The environment in which a process makes the mistake of that name (`code_faults`)."""
    return {
        "PYTHONPATH": f"{CODE_FAULTS}:{REPOSITORY}",
        "MILES_TEST_CODE_FAULT": name,
        "MILES_TEST_FAULT_MEMORY": str(folder / "memory.txt"),
    }


def read_bisect(folder: Path, output: str) -> dict[str, Any]:
    path = folder / "bisect.json"
    assert path.is_file(), output
    data: dict[str, Any] = json.loads(path.read_text())
    assert data["ended"] == "complete", output
    return data


def bisect(*arguments: str, out: Path, env: Any = None) -> tuple[Ended, dict[str, Any]]:
    ended = run_miles("bisect", "qwen3-tiny", *arguments, out=out, env=env)
    data = read_bisect(out, ended.explain())
    assert len({json.dumps(side) for side in data["fingerprint"].values()}) == 1
    assert [(op["layer"], op["op"], op["tensor"]) for op in data["ops"]] == [
        (place.layer, place.op, place.tensor) for place in FLOW
    ]
    assert all(op["rows"] > 0 for op in data["ops"])
    page = (out / "bisect.html").read_text()
    assert data["message"].split(",")[0] in page
    return ended, data


def assert_equal(ended: Ended, data: dict[str, Any]) -> None:
    assert ended.returncode == 0, ended.explain()
    assert data["first_divergence"] is None and data["heat"] is None
    assert all(op["differ"] == 0 for op in data["ops"])
    assert "none differs" in ended.output


def test_nothing_wrong_is_null_over_different_layouts_with_chunked_prefill(tmp_path: Path) -> None:
    layout = ("--rollout-tp", "2", "--cp", "2", "rollout.chunked_prefill_size=32")
    assert_equal(*bisect(*layout, *SMALL, out=tmp_path / "run"))


def test_decode_and_prefill_of_the_engine_are_equal(tmp_path: Path) -> None:
    """Without a trainer; the responses are decoded, then prefilled as whole sequences."""
    out = tmp_path / "run"
    ended, data = bisect("--tp", "2", "--between", "decode,prefill", *SMALL, out=out)
    assert_equal(ended, data)
    assert set(data["fingerprint"]) == {"decode", "prefill"}
    logs = {path.name for path in (out / "logs").iterdir()}
    assert "rollout.log" in logs and not any("trainer" in name for name in logs)


def test_a_fault_in_the_rollout_is_named(tmp_path: Path) -> None:
    """Row 5 of the first prefill is position 5 of the first sequence."""
    fault = ("--inject-fault", "rollout:1:gate_up_proj:1:5")
    ended, data = bisect("--tp", "2", *fault, *SMALL, out=tmp_path / "run")
    assert ended.returncode == 3, ended.explain()
    first = data["first_divergence"]
    assert (first["layer"], first["op"], first["tensor"]) == (1, "gate_up_proj", "output")
    token = first["token"]
    assert (token["sequence"], token["position"], token["part"]) == (0, 5, "prompt")
    assert first["inputs_equal"] is True and first["ulp"] == 1
    assert first["bits"]["rollout"] != first["bits"]["trainer"]
    # Two shards disagree with two shards; the reference says which one is wrong.
    assert (first["side"], first["rank"], first["judged_by"]) == ("rollout", 1, "reference")
    element = first["element"]
    assert element["ranks"] == {"rollout": 1, "trainer": 1} and element["differ"] == 1
    assert element["of"] == 2 * 1536, "the whole row was compared, both shards of it"
    assert "layer 1 gate_up_proj, sequence 0 position 5" in ended.output
    assert first["look_at"]["rollout"]["source"] == "sglang_patch/hooks/linear.py"
    wrong = [op for op in data["ops"] if op["differ"]]
    assert (wrong[0]["layer"], wrong[0]["op"]) == (1, "gate_up_proj")
    heat = dict(
        zip(map(tuple, data["heat"]["tokens"]), data["heat"]["elements_differ"], strict=True)
    )
    assert heat[0, 5][:3] == [0, 0, heat[0, 5][2]] and heat[0, 5][2] > 0
    # 24 bytes a token's name, 8 a digest: nothing grows with the width of a row.
    tokens = sum(len(sequence) for sequence in data["tokens"])
    assert 0 < data["record_bytes"]["digests"] < 2 * 2 * tokens * (9 * len(FLOW) + 200)
    assert 0 < data["record_bytes"]["rows"]
    assert data["ulp"]["differ"] == sum(bucket[2] for bucket in data["ulp"]["buckets"]) > 0


@pytest.mark.parametrize(
    ("layout", "sides"),
    [(("--tp", "2"), "both"), (("--pp", "2"), "trainer"), (("--cp", "2"), "trainer")],
    ids=["tp2", "pp2", "cp2"],
)
def test_a_fault_at_any_tap_is_named(tmp_path: Path, layout: tuple[str, str], sides: str) -> None:
    swept(tmp_path, *layout, "--sweep", sides, faults=2 if sides == "both" else 1)


def test_a_fault_at_any_tap_of_a_prefill_is_named_against_decode(tmp_path: Path) -> None:
    swept(tmp_path, "--between", "decode,prefill", "--sweep", "prefill", faults=1)


def swept(tmp_path: Path, *arguments: str, faults: int) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in PROMPTS))
    out = tmp_path / "run"
    given = ("--prompts", str(prompts), *arguments, *SHORT)
    ended = run_miles("bisect", "qwen3-tiny", *given, out=out)
    assert ended.returncode == 0, ended.explain()
    results = read_bisect(out, ended.explain())["sweep"]
    outputs = [place for place in FLOW if place.is_output]
    assert len({result["fault"] for result in results}) == faults * len(outputs)
    assert all(result["problem"] is None for result in results)
    assert f"all {faults * len(outputs)} injected faults were named" in ended.output


def test_the_historic_fault_is_bisected_where_the_gate_closed(tmp_path: Path) -> None:
    """A plain tree over the K tiles, in the trainer alone, from the first update on: the gate
    closes in step 1, that step's weights are kept, and its batch is bisected with them."""
    out = tmp_path / "run"
    ended = run_miles(
        *("launch", "qwen3-tiny", "--tp", "2", "--contract", "qwen3_dense_true_on_policy_v1"),
        *(*SMALL, "--steps", "3", "--bisect-on-mismatch"),
        out=out,
        env=with_fault("plain_tree_after_training", tmp_path),
    )
    assert ended.returncode == 3, ended.explain()
    assert [step["mismatched_tokens"] > 0 for step in ended.steps] == [False, True]
    assert f"miles bisect --replay {out}" in ended.output
    mismatch = json.loads((out / "mismatch.json").read_text())
    assert mismatch["step"] == 1 and Path(mismatch["weights"]).parent == out
    data = read_bisect(out / "bisect", ended.explain())
    assert data["tokens"] == mismatch["tokens"], "that very batch"
    first = data["first_divergence"]
    assert (first["layer"], first["op"], first["tensor"]) == (0, "down_proj", "output")
    assert first["inputs_equal"] is True
    assert first["look_at"]["policy"]["path"] == "tiles"
    # Both ranks of the trainer hold the same wrong sum; the written order says that it is wrong.
    assert (first["side"], first["judged_by"]) == ("trainer", "reference")
    assert "down_proj is at fault" in ended.output

    # Without the mistake the same batch does not come out as it did, and that is said.
    again = run_miles("bisect", "--replay", str(out), out=tmp_path / "again")
    assert again.returncode == 3, again.explain()
    assert "the trainer's logprobs are others than in the run" in again.output


def test_stale_weights_in_one_layer_on_one_rank_are_named(tmp_path: Path) -> None:
    env = with_fault("stale_rollout_weights", tmp_path)
    ended, data = bisect("--tp", "2", *SMALL, out=tmp_path / "run", env=env)
    assert ended.returncode == 3, ended.explain()
    first = data["first_divergence"]
    assert (first["layer"], first["op"], first["tensor"]) == (2, "gate_up_proj", "output")
    assert (first["side"], first["rank"], first["judged_by"]) == ("rollout", 1, "reference")
    assert first["inputs_equal"] is True
    assert data["weights"].startswith("weights differ") and "weights differ" in ended.output
