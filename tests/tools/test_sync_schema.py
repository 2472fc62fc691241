"""`tools/sync_schema.py` on a tampered copy of the repository: found, named, repaired.

Each case runs the tool as the Makefile, the CI and pre-commit run it, and looks at its exit code.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "sync_schema.py"
VENDORED = {
    "sglang_patch/schema": "schema",
    "megatron_patch/schema": "schema",
    "miles_launcher/schema": "schema",
    "megatron_patch/ops": "sglang_patch/ops",
}


def sync(root: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), "--root", str(root), *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The canonical folders and their copies, and nothing else of the repository."""
    for folder in {*VENDORED.values(), *VENDORED}:
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    # Start from what is canonical here, so that one test alone says whether the repository is in
    # sync and the others still show what the tool does.
    for copy, canonical in VENDORED.items():
        shutil.rmtree(tmp_path / copy)
        shutil.copytree(tmp_path / canonical, tmp_path / copy)
    return tmp_path


def test_this_repository_is_in_sync() -> None:
    done = sync(ROOT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("copy", "canonical"), VENDORED.items())
def test_this_repository_is_in_sync_by_our_own_eyes(copy: str, canonical: str) -> None:
    """Without the tool: it must not be the only witness of its own claim."""
    ours = contents(ROOT / canonical)
    assert len(ours) >= 5
    assert contents(ROOT / copy) == ours


def test_clean_copy_passes(root: Path) -> None:
    done = sync(root)
    assert (done.returncode, done.stdout) == (0, "vendored copies: identical\n")


@pytest.mark.parametrize("copy", VENDORED)
def test_one_changed_byte_is_named_with_its_line(root: Path, copy: str) -> None:
    target = sorted((root / copy).rglob("*.py"))[-1]
    lines = target.read_bytes().splitlines(keepends=True)
    number = len(lines) // 2
    lines[number] = b"#" + lines[number][1:] if len(lines[number]) > 1 else b"#\n"
    target.write_bytes(b"".join(lines))

    done = sync(root)
    assert done.returncode == 1
    first = done.stderr.splitlines()[0]
    assert first.startswith(f"{target.relative_to(root).as_posix()}: line {number + 1}: ")
    assert repr(lines[number]) in first
    assert "python tools/sync_schema.py --write" in done.stderr


@pytest.mark.parametrize(
    "change", [lambda text: text.replace(b"\n", b"\r\n"), lambda text: text + b"\n"]
)
def test_line_ends_and_trailing_bytes_count(root: Path, change: object) -> None:
    target = root / "megatron_patch/schema/contract.py"
    assert callable(change)
    target.write_bytes(change(target.read_bytes()))
    done = sync(root)
    assert done.returncode == 1
    assert "megatron_patch/schema/contract.py: line " in done.stderr


def test_truncated_file_is_named_where_it_ends(root: Path) -> None:
    target = root / "miles_launcher/schema/reduction.py"
    lines = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(lines[:10]))
    done = sync(root)
    assert done.returncode == 1
    assert "miles_launcher/schema/reduction.py: line 11: copy ends early" in done.stderr


def test_missing_and_extra_files_are_both_named(root: Path) -> None:
    (root / "sglang_patch/schema/vocabulary.py").unlink()
    (root / "megatron_patch/ops/rope/extra.py").write_text("surprise = True\n")
    done = sync(root)
    assert done.returncode == 1
    assert "sglang_patch/schema/vocabulary.py: missing" in done.stderr
    assert "megatron_patch/ops/rope/extra.py: not in sglang_patch/ops" in done.stderr
    assert "2 vendored files differ" in done.stderr


def test_every_difference_is_listed_at_once(root: Path) -> None:
    for copy in VENDORED:
        (root / copy / "__init__.py").write_text("")
    done = sync(root)
    assert done.returncode == 1
    assert all(f"{copy}/__init__.py: line 1: " in done.stderr for copy in VENDORED)


def test_a_missing_canonical_folder_is_an_error_and_not_agreement(root: Path) -> None:
    for folder in ("schema", "sglang_patch/schema", "megatron_patch/schema"):
        shutil.rmtree(root / folder)
    shutil.rmtree(root / "miles_launcher/schema")
    done = sync(root)
    assert done.returncode == 1
    assert "schema: no canonical files" in done.stderr


def test_caches_of_the_interpreter_do_not_count(root: Path) -> None:
    cache = root / "megatron_patch/schema/__pycache__"
    cache.mkdir()
    (cache / "contract.cpython-311.pyc").write_bytes(b"\0")
    assert sync(root).returncode == 0


def test_write_repairs_everything_and_leaves_the_canonical_text_alone(root: Path) -> None:
    before = {name: contents(root / name) for name in ("schema", "sglang_patch/ops")}
    (root / "sglang_patch/schema/vocabulary.py").unlink()
    (root / "megatron_patch/ops/rope/extra.py").write_text("surprise = True\n")
    (root / "megatron_patch/ops/linear/op.py").write_text("")
    shutil.rmtree(root / "miles_launcher/schema")
    assert sync(root).returncode == 1

    done = sync(root, "--write")
    assert (done.returncode, done.stderr) == (0, "")
    assert sync(root).returncode == 0
    assert {name: contents(root / name) for name in before} == before
    for copy, canonical in VENDORED.items():
        assert contents(root / copy) == contents(root / canonical)


def test_check_changes_nothing(root: Path) -> None:
    (root / "megatron_patch/schema/contract.py").write_text("")
    before = contents(root)
    assert sync(root).returncode == 1
    assert contents(root) == before


@pytest.mark.parametrize("flag", ["--wri", "--fix"])
def test_unknown_and_abbreviated_flags_are_refused(root: Path, flag: str) -> None:
    done = sync(root, flag)
    assert done.returncode == 2
    assert flag in done.stderr


def test_make_target_runs_this_tool() -> None:
    """`make sync-schema` is the documented way in; a dry run shows what it would do."""
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "sync-schema"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tools/sync_schema.py" in done.stdout
