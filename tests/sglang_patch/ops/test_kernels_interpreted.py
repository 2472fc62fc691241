"""Runs `interpreted_*.py`, each in a process of its own, under Triton's interpreter.

The interpreter is chosen when a kernel is defined, so it cannot be switched on inside this process
without changing every other test that imports a kernel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# File -> more tests than this pass in it.
CASES = {"interpreted_kernels.py": 38, "interpreted_attention.py": 6}
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", CASES)
def test_kernels_under_the_interpreter(name: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    # The interpreter itself makes NumPy warn (NaN to integer, arrays as scalars).
    options = ["-q", "-x", "-W", "ignore", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(Path(__file__).with_name(name))]
    done = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    passed = re.search(r"(\d+) passed", output)
    assert passed and int(passed.group(1)) > CASES[name], output
    assert "skipped" not in output, output
