"""What may report speed, and that the document's tables are the committed results'."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.suite import BENCHMARKS, Benchmark, refusal, select
from miles_launcher.conformance.certificate import OP_NAMES, Cell, Certificate, Machine

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = Benchmark(name="some", ops=("rope", "linear"))
GOOD = Cell(status="ok", detail="", compared=5, seconds=0.0, degrees=())


def certificate(**ops: dict[str, Cell]) -> Certificate:
    return Certificate(
        format=1,
        date="",
        device=Machine(kind="cuda", name="G", capability="9.0", driver=None),
        versions={},
        ops_digest="",
        schema_digest="",
        contracts={},
        setting="full",
        seconds=0.0,
        results=ops,
        ok=True,
        complete=False,
        digest="",
    )


def test_a_proven_op_may_report_speed() -> None:
    unshown = replace(GOOD, status="not shown", compared=0)
    proof = certificate(rope={"order": GOOD}, linear={"order": GOOD, "ranks": unshown})
    assert refusal(BENCHMARK, proof, 1) is None


@pytest.mark.parametrize(
    ("linear", "reason"),
    [
        ({"order": GOOD, "value": replace(GOOD, status="failed")}, "linear failed value"),
        ({}, "linear was not run"),
        ({"order": replace(GOOD, compared=0)}, "linear: the conformance suite compared nothing"),
    ],
)
def test_a_red_absent_or_empty_proof_reports_no_speed(linear: dict[str, Cell], reason: str) -> None:
    said = refusal(BENCHMARK, certificate(rope={"order": GOOD}, linear=linear), 1)
    assert said is not None and said.startswith(reason)


def test_too_few_gpus_are_said_with_the_numbers() -> None:
    proof = certificate(rope={"order": GOOD}, linear={"order": GOOD})
    assert refusal(replace(BENCHMARK, gpus=2), proof, 1) == "needs 2 GPUs, 1 here"


def test_every_benchmark_is_a_module_and_names_ops_of_the_suite() -> None:
    for benchmark in BENCHMARKS:
        assert importlib.util.find_spec(benchmark.module), benchmark.module
        assert benchmark.ops and set(benchmark.ops) <= set(OP_NAMES)
    assert select(()) == BENCHMARKS
    with pytest.raises(ValueError, match="unknown benchmark 'rows'; there are row_linear"):
        select(["rows"])


def test_the_command_says_what_is_wrong_before_it_runs_anything(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", str(tmp_path / "out"), "--only", "rows"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("error: unknown benchmark 'rows'")
    assert not (tmp_path / "out").exists()


def test_the_documents_tables_are_those_of_the_results() -> None:
    text = tables.DOCUMENT.read_text()
    assert text.count("<!-- table ") >= 4
    assert tables.render(text) == text


def test_sums_over_ranks_have_a_table() -> None:
    times = {"all-reduce": 9.04, "nccl bf16": 20.0, "nccl fp32": 21.0}
    rows = [
        {"rows": 1, "us": times, "over_nccl_bf16": 0.452, "over_nccl_fp32": 0.43},
        {"rows": 2, "differing": 3},
        {"rows": 64, "us": {**times, "two shots": 8.0}, "over_nccl_bf16": 1, "over_nccl_fp32": 1},
    ]
    lines = tables.collectives({"rows": rows}).splitlines()
    assert lines[0].startswith("| rows | all-reduce | nccl bf16 | nccl fp32 | two shots |")
    assert lines[2] == "| 1 | 9.0 | 20.0 | 21.0 |  | 0.45 | 0.43 |"
    assert len(lines) == 4 and lines[3].startswith("| 64 |"), "other bits have no time"


def test_a_changed_figure_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "<!-- table linear r.json -->\nstale\n<!-- end -->\n"
    row = {"layer": "a", "rows": 1, "columns": 2, "k": 3, "ratio": 1.051, "target": 1.05}
    (tmp_path / "r.json").write_text(json.dumps({"rows": [row]}))
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    assert "| a (2, 3) | **1.05** |" in tables.render(text)
    (tmp_path / "r.json").write_text(json.dumps({"rows": [{**row, "ratio": 1.05}]}))
    assert "| a (2, 3) | 1.05 |" in tables.render(text)
    with pytest.raises(ValueError, match="no such table or file"):
        tables.render(text.replace("r.json", "s.json"))


def test_the_attentions_table_says_where_fa3_did_not_run() -> None:
    case = {"kind": "decode", "sequences": 16, "keys": 512, "head_dim": 128, "differing": 0}
    times = {"ratio": 0.871, "over_fa3": 1.204, "ours_us": 12.5, "floor_us": 7.0}
    rows = [{**case, **times}, {**case, "head_dim": 64, "differing": 3}]
    text = tables.attention({"rows": rows})
    assert "| decode | 128 | 16 x 512 | 0.87 | 1.20 | 12.5 | 7.0 |\n" in text
    assert "| decode | 64 | 16 x 512 |  |  |  |  |\n" in text, "other bits have no speed"


def test_the_elementwise_tables_show_what_misses_its_target_and_what_was_wrong() -> None:
    def row(rows: int, way: str = "forward", **of: float) -> dict[str, object]:
        return {"op": "silu_mul", "pass": way, "model": "4B", "rows": rows, **of}

    document = {
        "rows": [
            row(1, of_copy_bandwidth=0.5, stock_over_ours=1.9),
            row(
                2048,
                of_copy_bandwidth=0.849,
                stock_over_ours=3.0,
                ours_launches=1,
                stock_launches=2,
            ),
            row(2048, "backward", wrong=True),
            row(8192, of_copy_bandwidth=0.85, stock_over_ours=2.0),
        ]
    }
    bandwidth = tables.elementwise_bandwidth(document)
    assert "| silu_mul, forward | 4B | **0.85** | 0.85 |" in bandwidth
    assert "| silu_mul, backward | 4B | wrong | — |" in bandwidth and "T=1 " not in bandwidth
    assert "| silu_mul, forward | 4B | **1.9** | 3.0 | 2.0 |" in tables.elementwise_stock(document)
    assert "| silu_mul, forward | 1 | 2 |" in tables.elementwise_launches(document)


def test_elementwise_counts_every_byte_once() -> None:
    from benchmarks.elementwise import Case, cases

    assert Case("add_rms_norm", "4B", 10, False).bytes == 10 * 2560 * (2 + 4 + 2 + 4)
    assert Case("qk_norm_rope", "4B", 10, True).bytes == 10 * 128 * 2 * (3 * 32 + 5 * 8)
    assert Case("silu_mul", "8B", 3, True).bytes == 3 * 12288 * 2 * (2 + 1 + 2)
    assert {case.rows for case in cases() if case.backward} == {2048, 8192, 32768}
