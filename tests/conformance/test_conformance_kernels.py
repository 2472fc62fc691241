"""Runs `interpreted_suite.py` in a process of its own, under Triton's interpreter.

The interpreter is chosen when a kernel is defined, so it cannot be switched on inside this process
without changing every other test that imports a kernel.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from miles_launcher.conformance.checks import OPS

CASES = Path(__file__).with_name("interpreted_suite.py")
ROOT = Path(__file__).parents[2]


def test_the_suite_over_the_kernels_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    # The interpreter itself makes NumPy warn (NaN to integer, arrays as scalars).
    options = ["-q", "-x", "-W", "ignore", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(CASES)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    passed = re.search(r"(\d+) passed", output)
    assert passed and int(passed.group(1)) == len(OPS), output
    assert "skipped" not in output, output


def test_what_a_gpu_is_asked_travels_to_real_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are processes of their own: every entry of every table must arrive there."""
    from miles_launcher.conformance import hopper
    from miles_launcher.conformance.kernels import kernel_subject

    monkeypatch.setattr(hopper, "is_hopper", lambda: True)
    subject = kernel_subject()
    assert len(subject.tables) == 4 and len(subject.fitted) == 2
    arrived = pickle.loads(pickle.dumps(subject))
    for (name, sent), (same, table) in zip(subject.tables, arrived.tables, strict=True):
        assert name == same and table.entries == sent.entries
    assert [name for name, _ in arrived.fitted] == [name for name, _ in subject.fitted]
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(lambda: subject)
