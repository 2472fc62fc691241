"""What the throughput benchmarks compare: engines that differ in the contract alone."""

from __future__ import annotations

from pathlib import Path

from benchmarks import tables
from benchmarks.engine_throughput import VARIANTS, plan_of
from benchmarks.engine_worker import kernel_table


def test_the_engines_differ_in_the_contract_alone(tmp_path: Path) -> None:
    kwargs = {v: plan_of(v, "qwen3-tiny", "cpu", tmp_path)[1] for v in VARIANTS}
    contract, stock, deterministic = (kwargs[v] for v in VARIANTS)
    own = {"true_on_policy_contract", "enable_deterministic_inference"}
    assert own <= contract.keys() and not own & stock.keys()
    assert {k: v for k, v in contract.items() if k not in own} == stock
    assert deterministic == {**stock, "enable_deterministic_inference": True}


def test_a_kernel_table_adds_the_calls_of_its_kind() -> None:
    def event(name: str, cat: str, dur: float, ph: str = "X") -> dict[str, object]:
        return {"name": name, "cat": cat, "dur": dur, "ph": ph}

    events = [
        event("a", "kernel", 1.0),
        event("b", "kernel", 6.0),
        event("a", "kernel", 3.0),
        event("c", "cpu_op", 99.0),
        {"name": "flow", "ph": "s", "cat": "kernel"},
    ]
    rows = kernel_table(events, ("kernel",))
    assert [(r["name"], r["microseconds"], r["calls"], r["share"]) for r in rows] == [
        ("b", 6.0, 1, 0.6),
        ("a", 4.0, 2, 0.4),
    ]
    assert kernel_table(events, ("gpu_memcpy",)) == []


def test_the_engines_table_shows_a_missed_target() -> None:
    place = {"what": "decode", "batch": 16, "prompt_tokens": 128}
    rows = [
        {**place, "variant": "contract", "tokens_per_s": 890.0},
        {**place, "variant": "stock", "tokens_per_s": 1000.4},
        {**place, "variant": "deterministic", "tokens_per_s": 700.0},
    ]
    ratios = [{**place, "over_stock": 0.8896, "over_deterministic": 1.2714}]
    text = tables.engine_throughput({"rows": rows, "ratios": ratios})
    assert text.endswith("| decode, 16 x 128 | 890 | 1000 | 700 | **0.89** | 1.27 |\n")


def test_a_ratio_that_rounds_up_to_the_target_still_misses_it() -> None:
    rows = [
        {"what": "forward_backward", "variant": "contract", "ms": 100.0},
        {"what": "forward_backward", "variant": "stock", "ms": 89.96},
    ]
    document = {"rows": rows, "ratios": [{"what": "forward_backward", "over_stock": 0.8996}]}
    line = tables.train_throughput(document).splitlines()[-1]
    assert line == "| forward and backward | 100.0 | 90.0 | **0.90** |"
