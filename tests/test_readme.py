"""What the README tells a reader to type is typed here: each `miles` line, as a dry run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """Every line of the README's shell blocks that calls `miles`, without comments."""
    lines = []
    for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL):
        for line in block.splitlines():
            code = line.partition("#")[0].strip()
            # Two commands may share a line, set apart by a wide gap.
            lines += [part.strip() for part in re.split(r"\s{3,}", code) if "miles " in part]
    return lines


STARTING = [line for line in commands() if re.search(r"miles (launch|parity|bisect)", line)]
CONFORMING = [line for line in commands() if "miles conform" in line]
SHOWING = [line for line in commands() if re.search(r"miles (plan|contracts|profiles)", line)]


def run(line: str, cwd: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    words = shlex.split(line)
    assignments = [word for word in words if re.match(r"[A-Z_]+=", word)]
    rest = words[len(assignments) :]
    assert rest[0] == "miles"
    return subprocess.run(
        [sys.executable, "-m", "miles_launcher.cli", *rest[1:], *extra],
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            **dict(word.split("=", 1) for word in assignments),
        },
        capture_output=True,
        text=True,
    )


def test_the_readme_still_shows_commands() -> None:
    assert len(STARTING) >= 7 and len(SHOWING) >= 3 and len(CONFORMING) >= 2


@pytest.mark.parametrize("line", STARTING)
def test_a_command_that_starts_something_plans_as_documented(line: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    (tmp_path / "my_rewards.py").write_text(
        "def score(samples):\n    return [0.0 for _ in samples]\n"
    )
    ended = run(line, tmp_path, "--dry-run", "--out", str(tmp_path / "run"))
    if "--model-path" in line:
        # No such checkpoint on this machine: the folder must be named, nothing else.
        assert ended.returncode == 2 and "/models/Qwen3-4B" in ended.stderr
        return
    if "--replay" in line:
        # Nor a run whose gate closed.
        assert ended.returncode == 2 and "cannot read the plan" in ended.stderr
        return
    if "--require-certificate" in line:
        # Nor a certificate: a launch that requires one names what is missing.
        assert ended.returncode == 2 and "certified: cannot read" in ended.stderr
        return
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "plan.json").is_file()


@pytest.mark.parametrize("line", CONFORMING)
def test_a_conformance_run_as_documented(line: str, tmp_path: Path) -> None:
    """One op, at small size, on the CPU: options given twice are the last ones."""
    small = ("--device", "cpu", "--quick", "--op", "temperature", "--out", str(tmp_path / "here"))
    ended = run(line, tmp_path, *small)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "here" / "conformance.json").is_file()


@pytest.mark.parametrize("line", SHOWING)
def test_a_command_that_shows_something_shows_it(line: str, tmp_path: Path) -> None:
    ended = run(line, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() and not list(tmp_path.iterdir())


def test_every_file_and_folder_that_the_documents_name_exists() -> None:
    documents = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
    for document in documents:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"
