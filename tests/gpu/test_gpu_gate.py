"""The short form of `make gpu-gate` on the GPU present: one start, three of its groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("not run: no GPU", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]


def test_the_short_gate_is_exact(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "miles_launcher.gpu_gate", "--model", "qwen3-0.6b"]
        + ["--only", "tp1", "--groups", "prompts", "cache", "training", "--out", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    entries = json.loads((tmp_path / "gate.json").read_text())["configurations"]
    assert [entry["name"] for entry in entries] == ["tp1:prompts", "tp1:cache", "tp1:training"]
    assert all(entry["compared_tokens"] >= 4096 for entry in entries)
