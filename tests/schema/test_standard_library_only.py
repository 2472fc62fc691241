"""The schema runs where nothing is installed: standard library only, no torch, no I/O."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
before = set(sys.modules)
sys.path.insert(0, sys.argv[1])
import importlib
schema = importlib.import_module(sys.argv[2])
own = sys.argv[2].partition(".")[0]
loaded = {name.partition(".")[0] for name in set(sys.modules) - before} - {own}
foreign = sorted(loaded - set(sys.stdlib_module_names))
assert not foreign, foreign
assert "site" not in sys.modules
order = schema.association("qwen3_dense_true_on_policy_v1", 768)
assert order == (((0, 1), 2), ((3, 4), 5)), order
print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    "module",
    ["schema", "sglang_patch.schema", "megatron_patch.schema", "miles_launcher.schema"],
)
def test_importing_it_loads_no_third_party_module(module: str) -> None:
    """-S and -I: no site-packages to import from, no environment, no current folder."""
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", PROGRAM, str(ROOT), module],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
