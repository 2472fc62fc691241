"""Runs `plugin_cases.py` in a process of its own, and the CPU hash against SGLang's kernel.

One process: importing SGLang takes about as long as all other tests of this folder together.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("plugin_cases.py")
ROOT = Path(__file__).resolve().parents[2]


def run(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_plugin_against_the_installed_engine() -> None:
    done = run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)],
        {"CUDA_VISIBLE_DEVICES": "", "SGLANG_PLATFORM": "true_on_policy_cpu"},
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None, output
    assert int(passed.group(1)) > 50, output
    assert "skipped" not in output, output


# The kernel's file is loaded by itself, so that the rest of the engine is neither imported nor
# compiled by the interpreter. Columns cross the kernel's block of 1024.
MURMUR = """
import importlib.util, warnings
from pathlib import Path
import torch
from sglang_patch.hooks.cpu import murmur_hash32

warnings.simplefilter("ignore")
package = importlib.util.find_spec("sglang").submodule_search_locations[0]
path = Path(package) / "kernels" / "ops" / "sampling" / "murmur_hash.py"
spec = importlib.util.spec_from_file_location("murmur_hash_kernel", path)
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)

edges = [0, 1, 42, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -1, -2**63, -(2**31)]
seeds = torch.tensor(edges + torch.randint(2**62, (6,), generator=torch.Generator()).tolist())
positions = torch.tensor([0, 1, 2, 4097, 2**20, 2**31 - 1, 7, 8, 9, 10, *range(100, 106)])
columns = torch.arange(1030)
expected = kernel.murmur_hash32(seeds, positions, columns)
for seed in (seeds, seeds.view(torch.uint64)):
    found = murmur_hash32(None, seed, positions, columns)
    assert found.dtype == expected.dtype == torch.uint32
    assert found.shape == expected.shape == (16, 1030)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
assert len(set(found.flatten().tolist())) > 16000, "a hash that repeats proves little"
moved = murmur_hash32(None, seeds ^ 1, positions, columns)
assert not (moved.view(torch.int32) == expected.view(torch.int32)).all(dim=1).any()
print("equal")
"""


def test_murmur_hash_on_the_cpu_is_the_kernel_bit_for_bit() -> None:
    done = run(["-c", MURMUR], {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
