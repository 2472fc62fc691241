"""A run joins a cluster that is there already, and leaves it as it was; or says why it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import SMALL, assert_exact, run_miles

# Ends, with all its processes, when its standard input closes.
HEAD = """
import sys, ray
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
for line in sys.stdin:
    print(len(ray.nodes()), sum(n["Alive"] for n in ray.nodes()), flush=True)
ray.shutdown()
"""


@contextmanager
def cluster(cwd: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": "", "RAY_AUTH_MODE": "disabled"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.stdin.close()
        process.wait(timeout=60)


def test_a_cluster_that_cannot_be_joined_is_a_clear_error(tmp_path: Path) -> None:
    ended = run_miles(
        "parity",
        "qwen3-tiny",
        out=tmp_path / "run",
        env={"RAY_ADDRESS": "127.0.0.1:1"},
    )
    assert ended.returncode == 2, ended.explain()
    assert "RAY_ADDRESS=127.0.0.1:1: nothing answers" in ended.output
    assert ended.report is not None and ended.report["ended"] == "configuration"


@pytest.mark.parametrize(("length", "who"), [(50, "RAY_TMPDIR"), (90, "a socket in it")])
def test_a_temporary_folder_too_long_for_sockets_is_a_clear_error(
    length: int, who: str, tmp_path: Path
) -> None:
    """Ray's sockets have longer names than those that weights pass through."""
    with tempfile.TemporaryDirectory(prefix="t") as short:
        folder = Path(short) / ("x" * (length - len(short) - 1))
        folder.mkdir()
        ended = run_miles("parity", "qwen3-tiny", out=tmp_path / "run", env={"TMPDIR": str(folder)})
    assert ended.returncode == 2, ended.explain()
    assert f"{folder}" in ended.output and who in ended.output
    assert "export TMPDIR=/tmp" in ended.output and "Traceback" not in ended.output
    assert ended.report is not None and ended.report["ended"] == "configuration"


def test_a_run_joins_a_cluster_and_leaves_it_running(tmp_path: Path) -> None:
    with cluster(tmp_path) as (address, head):
        assert address, "the cluster did not start"
        ended = run_miles(
            "parity",
            "qwen3-tiny",
            "--steps",
            "1",
            *SMALL,
            out=tmp_path / "run",
            env={"RAY_ADDRESS": address},
        )
        assert_exact(ended, steps=1, train=False)
        assert head.stdin is not None and head.stdout is not None
        head.stdin.write("alive?\n")
        head.stdin.flush()
        assert head.stdout.readline().split() == ["1", "1"]
