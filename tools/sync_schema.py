"""Check, or with --write repair, that every vendored copy equals its canonical text byte for byte.

    python tools/sync_schema.py            exit 1, naming each file and the first differing line
    python tools/sync_schema.py --write    copy the canonical text over the copies

Canonical: `schema/` (three copies) and `sglang_patch/ops/` (one copy: rollout is the numerical
truth).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

MANIFEST: dict[str, tuple[str, ...]] = {
    "schema": ("sglang_patch/schema", "megatron_patch/schema", "miles_launcher/schema"),
    "sglang_patch/ops": ("megatron_patch/ops",),
}
_IGNORED_DIRECTORIES = {"__pycache__"}


def _files(folder: Path) -> set[Path]:
    return {
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_file() and not _IGNORED_DIRECTORIES & set(path.relative_to(folder).parts)
    }


def _first_difference(canonical: bytes, copy: bytes) -> str:
    ours, theirs = canonical.splitlines(keepends=True), copy.splitlines(keepends=True)
    for number, (expected, found) in enumerate(zip(ours, theirs, strict=False), start=1):
        if expected != found:
            return f"line {number}: canonical {expected!r}, copy {found!r}"
    number = min(len(ours), len(theirs)) + 1
    longer = "copy ends early" if len(ours) > len(theirs) else "copy has extra text"
    return f"line {number}: {longer}"


def differences(root: Path) -> list[str]:
    """One line per vendored file that is missing, extra or different, relative to `root`."""
    found = []
    for canonical_name, copies in MANIFEST.items():
        canonical = root / canonical_name
        expected = _files(canonical)
        if not expected:
            found.append(f"{canonical_name}: no canonical files")
        for copy_name in copies:
            present = _files(root / copy_name)
            for name in sorted(expected | present):
                label = f"{copy_name}/{name.as_posix()}"
                if name not in present:
                    found.append(f"{label}: missing")
                elif name not in expected:
                    found.append(f"{label}: not in {canonical_name}")
                else:
                    ours = (canonical / name).read_bytes()
                    theirs = (root / copy_name / name).read_bytes()
                    if ours != theirs:
                        found.append(f"{label}: {_first_difference(ours, theirs)}")
    return found


def write(root: Path) -> None:
    """Make every copy equal to its canonical folder, removing files that do not belong.

    Raises `ValueError` before anything is touched where a canonical folder has no files: that is
    another root, not a reason to empty the copies.
    """
    empty = [name for name in MANIFEST if not _files(root / name)]
    if empty:
        raise ValueError(f"{root}: no canonical files in {', '.join(empty)}; is --root right?")
    for canonical_name, copies in MANIFEST.items():
        canonical = root / canonical_name
        expected = _files(canonical)
        for copy_name in copies:
            for name in _files(root / copy_name) - expected:
                (root / copy_name / name).unlink()
            for name in expected:
                target = root / copy_name / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists() or target.read_bytes() != (canonical / name).read_bytes():
                    shutil.copyfile(canonical / name, target)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--write", action="store_true", help="repair the copies")
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).resolve().parent.parent, help="repository root"
    )
    arguments = parser.parse_args(argv)
    if arguments.write:
        try:
            write(arguments.root)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
    found = differences(arguments.root)
    for line in found:
        print(line, file=sys.stderr)
    if found:
        print(
            f"{len(found)} vendored files differ; repair with: python tools/sync_schema.py --write",
            file=sys.stderr,
        )
        return 1
    print("vendored copies: identical")
    return 0


if __name__ == "__main__":
    sys.exit(main())
