"""What the throughput benchmarks compare: engines that differ in the contract alone."""

from __future__ import annotations

from pathlib import Path

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
