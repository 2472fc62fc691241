"""The rules of the house, on the source text: who may import what, and what nobody may write.

What is allowed today is pinned as a list, file by file: a new exception is a decision that shows
in a diff here. Every checker is also run on a text that breaks its rule.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = ("sglang_patch", "megatron_patch", "miles_launcher")
FOLDERS = ("schema", "tools", "benchmarks", *DISTRIBUTIONS)
MOST_LINES = 500


def sources(*folders: str) -> list[Path]:
    """Python files below the folders, relative to the root."""
    return [
        path.relative_to(ROOT)
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "build" not in path.relative_to(ROOT).parts
    ]


def read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def imported(text: str) -> set[str]:
    """Dotted names of everything imported absolutely, at any depth, also through importlib."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            found |= {
                argument.value
                for argument in node.args[:1]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            }
    return found


def tops(text: str) -> set[str]:
    return {name.partition(".")[0] for name in imported(text)}


def importers(package: str, *folders: str) -> set[str]:
    """Which files import `package`; below hooks/, layers/ and runtime/ only the folder is told."""
    found = set()
    for path in sources(*folders):
        if package in tops(read(path)):
            parts = path.parts
            free = parts[1] in ("hooks", "layers", "runtime")
            found.add(f"{parts[0]}/{parts[1]}/" if free else path.as_posix())
    return found


def test_the_walker_sees_every_kind_of_import() -> None:
    text = (
        "import a.b, c as d\nfrom e.f import g\nfrom . import h\n"
        "def late():\n    import i\n    importlib.import_module('j.k')\n    __import__('l')\n"
    )
    assert imported(text) == {"a.b", "c", "e.f", "i", "j.k", "l"}
    assert tops(text) == {"a", "c", "e", "i", "j", "l"}


def test_schema_imports_the_standard_library_and_does_no_io() -> None:
    names = {name for path in sources("schema") for name in imported(read(path))}
    pure = {"collections.abc", "dataclasses", "hashlib", "json", "types", "typing"}
    assert names <= {"__future__", *pure}
    assert not [p for p in sources("schema") if re.search(r"\b(open|print|input)\(", read(p))]


def test_ops_import_torch_triton_and_one_kernel_package() -> None:
    for package in ("sglang_patch", "megatron_patch"):
        found = {name for path in sources(f"{package}/ops") for name in tops(read(path))}
        assert found - set(sys.stdlib_module_names) == {"torch", "triton", "sgl_kernel"}
        assert importers("sgl_kernel", package) == {f"{package}/ops/attention/kernel.py"}


# The engines' surfaces: hooks/, layers/ and runtime/, and these files.
ENGINE_FILES = {
    "sglang": {
        "miles_launcher/render.py",  # the installed engine's own argument names (miles doctor)
        "miles_launcher/runtime/",
        "sglang_patch/cpu_platform.py",
        "sglang_patch/hooks/",
        "sglang_patch/plugin.py",
        "sglang_patch/weights.py",  # which module class holds which block of the checkpoint
    },
    "megatron": {
        "megatron_patch/checkpoint.py",
        "megatron_patch/config.py",
        "megatron_patch/cpu_platform.py",
        "megatron_patch/grad_norm.py",
        "megatron_patch/layers/",
        "megatron_patch/model.py",
        "megatron_patch/parallel/packing.py",
        "megatron_patch/provider.py",
        "miles_launcher/doctor.py",
        "miles_launcher/runtime/",
    },
    "ray": {"miles_launcher/runtime/"},
    "sglang_patch": {
        "miles_launcher/conformance/bf16_sums.py",
        "miles_launcher/conformance/attention_entries.py",
        "miles_launcher/conformance/hopper.py",
        "miles_launcher/conformance/hopper_tiles.py",
        "miles_launcher/conformance/probe_kernels.py",
        "miles_launcher/conformance/subject.py",  # what is under test; the oracle imports no op
        "miles_launcher/doctor.py",
    },
    "megatron_patch": {"miles_launcher/doctor.py", "miles_launcher/runtime/"},
    "miles_launcher": set(),
}


@pytest.mark.parametrize("engine", ENGINE_FILES)
def test_only_these_files_touch(engine: str) -> None:
    """`sglang_patch` and `megatron_patch` import neither each other nor the launcher; nothing but
    the surfaces imports an engine."""
    assert importers(engine, "schema", "tools", *DISTRIBUTIONS) == ENGINE_FILES[engine]


def test_megatron_patch_imports_alone() -> None:
    """Every module of it, in a process where its siblings and the other engine do not exist."""
    modules = [
        path.with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for path in sources("megatron_patch")
        if path.name not in ("kernel.py", "elementary_kernel.py")
    ]
    assert len(modules) > 40
    program = (
        "import importlib, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "absent = ('sglang', 'sglang_patch', 'miles_launcher', 'schema', 'ray')\n"
        "for name in absent: sys.modules[name] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "assert not [n for n in sys.modules if n.startswith(tuple(a + '.' for a in absent))]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_both_vendored_op_sets_live_in_one_process() -> None:
    """Byte-identical text, and yet each registers under its own package's name."""
    import torch

    import megatron_patch.ops
    import sglang_patch.ops

    assert sglang_patch.ops.linear is not megatron_patch.ops.linear
    registered = torch._C._dispatch_get_all_op_names()
    ours = {
        package: sorted(
            name.partition("::")[2] for name in registered if name.startswith(f"{package}::")
        )
        for package in ("sglang_patch", "megatron_patch")
    }
    assert len(ours["sglang_patch"]) >= 8
    assert ours["sglang_patch"] == ours["megatron_patch"]


def swallowed(text: str) -> Iterator[str]:
    """Handlers that catch everything by accident, or catch anything and say nothing."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            kind = "" if node.type is None else ast.unparse(node.type)
            silent = all(isinstance(line, (ast.Pass, ast.Continue)) for line in node.body)
            if not kind:
                yield f"line {node.lineno}: bare except"
            elif kind in ("Exception", "BaseException") and silent:
                yield f"line {node.lineno}: except {kind} without a word"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            if {"Exception", "BaseException"} & {ast.unparse(a) for a in node.args}:
                yield f"line {node.lineno}: suppress everything"


# Autotuning would let timing, and atomics would let scheduling, choose the order of a sum.
CHOSEN_AT_RUN_TIME = re.compile(r"\b(autotune|heuristics|do_bench|atomic_\w+)\b|\.atomic")
# Integers that count arrivals: who adds the finished parts, and when, not in which order.
ARRIVALS = {
    "linear/kernel_few.py": (
        'if tl.atomic_add(arrivals_ptr + block, 1, sem="acq_rel") == LEAVES - 1:',
    ),
    "linear/kernel_roles.py": (
        'last = gl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == PARTS - 1',
    ),
    "row_linear/kernel_tiles_few.py": (
        'if tl.atomic_add(arrivals_ptr + block, 1, sem="acq_rel") == PARTS - 1:',
    ),
    "row_linear/kernel_tiles.py": (
        'last = gl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == PARTS - 1',
    ),
    "tree_all_reduce/kernel.py": (
        'tl.atomic_xchg(theirs, zero + epoch, sem="release", scope="sys")',
        'behind = tl.min(tl.atomic_add(mine, zero, sem="acquire", scope="sys") - epoch, 0)',
    ),
}


@pytest.mark.parametrize(
    "text",
    [
        "try: f()\nexcept: raise",
        "try: f()\nexcept Exception: pass",
        "for x in y:\n    try: f()\n    except BaseException: continue",
        "with contextlib.suppress(Exception): f()",
    ],
)
def test_the_checker_of_handlers_can_fail(text: str) -> None:
    assert list(swallowed(text))
    assert not list(swallowed("try: f()\nexcept (OSError, ValueError): pass"))
    assert not list(swallowed("try: f()\nexcept Exception as e: log(e)"))


def test_no_error_is_swallowed() -> None:
    found = [f"{p}: {x}" for p in sources(*FOLDERS, "tests") for x in swallowed(read(p))]
    assert not found, "\n".join(found)


def test_no_order_is_chosen_at_run_time() -> None:
    for bad in ("@triton.autotune(", "tl.atomic_add(p, x)", "triton.testing.do_bench"):
        assert CHOSEN_AT_RUN_TIME.search(bad)
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in sources("sglang_patch/ops", "megatron_patch/ops")
        for number, line in enumerate(read(path).splitlines(), start=1)
        if CHOSEN_AT_RUN_TIME.search(line)
        and line.strip() not in ARRIVALS.get("/".join(path.parts[2:]), ())
    ]
    assert not found, "\n".join(found)


def test_files_stay_readable() -> None:
    lines = {str(path): len(read(path).splitlines()) for path in sources(*FOLDERS, "tests")}
    long = {path: count for path, count in lines.items() if count > MOST_LINES}
    assert not long, f"more than {MOST_LINES} lines: {long}"


def test_every_module_says_what_it_is() -> None:
    silent = [str(p) for p in sources(*FOLDERS) if not ast.get_docstring(ast.parse(read(p)))]
    assert not silent, silent


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_an_install_misses_no_package(name: str) -> None:
    """The package list is explicit (the folder is its own distribution root): equal to the disk."""
    settings = tomllib.loads(read(Path(name) / "pyproject.toml"))["tool"]["setuptools"]
    folders = {path.parent for path in sources(name)}
    assert all((ROOT / folder / "__init__.py").exists() for folder in folders)
    on_disk = sorted(folder.as_posix().replace("/", ".") for folder in folders)
    assert sorted(settings["packages"]) == on_disk
    assert settings["package-dir"] == {name: "."}


# Written so that no line here is a finding: a place on somebody's machine, a package index.
PRIVATE = re.compile(
    r"(?<![\w.~])/(?:work|home|root|Users|mnt|scratch|workspace)/\w"
    r"|--(?:extra-)?index-[u]rl|https?://[^\s/]*(?:pypi|artifact|nexus|registry|mirror)"
)


def test_tracked_files_name_no_private_path_and_no_index() -> None:
    for bad in ("x = '/ho" + "me/me/x'", "pip --index-" + "url x", "https://my-reg" + "istry/x"):
        assert PRIVATE.search(bad)
    assert not PRIVATE.search("a/work/b ./root/x ~/home/x https://example.org")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split("\0")
    found = []
    for name in filter(None, listed):
        path = ROOT / name
        if not path.is_file() or b"\0" in (data := path.read_bytes()):
            continue
        for number, line in enumerate(data.decode("utf-8").splitlines(), start=1):
            if PRIVATE.search(line):
                found.append(f"{name}:{number}: {line.strip()[:100]}")
    assert len(listed) > 100
    assert not found, "\n".join(found)
