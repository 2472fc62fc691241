"""`make gpu-gate` on the real engines of a CPU: one start, two engines, every kind of group."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import environment


@pytest.fixture
def temporary() -> Iterator[str]:
    """A folder of temporary files whose name leaves room for the path of a socket."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield folder


def run_gate(out: Path, temporary: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "miles_launcher.gpu_gate", "--device", "cpu", "--gpus", "2"]
    return subprocess.run(
        [*command, "--only", "engines2", "--out", str(out), *arguments],
        cwd=out.parent,
        env={**environment(), "TMPDIR": temporary},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )


def test_two_engines_are_exact_and_what_was_whole_is_kept(tmp_path: Path, temporary: str) -> None:
    out, groups = tmp_path / "gate", ("cache", "bisect", "training")
    ended = run_gate(out, temporary, "--groups", *groups)
    assert ended.returncode == 0, ended.stdout
    index = json.loads((out / "gate.json").read_text())
    found = {entry["name"]: entry for entry in index["configurations"]}
    assert list(found) == [f"engines2:{group}" for group in groups]
    cache, bisect, training = found.values()
    assert cache["layout"]["engines"] == 2 and not cache["control"]
    # Each engine was given the shared prompt, and its hits are of the lengths that were asked for.
    counts = cache["facts"]["cached_tokens"]
    assert counts["again"] > counts["warm"] == sum(cache["facts"]["hit_lengths"]) > 0
    # The control: a fault of one ulp in the middle layer, which was named, and changed logprobs.
    assert bisect["control"] and bisect["mismatched_tokens"] > 0
    assert bisect["facts"]["named"].startswith("layer 2 down_proj")
    digests = [step["weights"]["rollout"] for step in training["facts"]["steps"]]
    assert len(digests) == 3 == len(set(digests))
    assert training["facts"]["grad_norm"] > 0
    # The same again starts nothing.
    again = run_gate(out, temporary, "--groups", *groups)
    assert again.returncode == 0 and again.stdout.count("kept from an earlier run") == 3
    assert "starting" not in again.stdout
    # Green runs leave no logs behind.
    assert not list(Path(temporary).glob("gpu-gate-*"))
