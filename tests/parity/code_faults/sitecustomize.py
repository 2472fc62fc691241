"""Put on PYTHONPATH by a test: a mistake in the code of the real engines' processes.

Python imports this file when it starts. `MILES_TEST_CODE_FAULT` names the mistake; it is made when
the module concerned has been imported, in the processes that import it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def plain_tree_after_training(module: ModuleType) -> None:
    """Contract v1: the trainer adds its K tiles in a plain tree, once its weights are no longer
    those with which the first process started (which a file remembers)."""
    original: Any = module.run_tree
    remembered = Path(os.environ["MILES_TEST_FAULT_MEMORY"])
    partial: Any = module.partial

    def plain(start: int, count: int) -> Any:
        if count == 1:
            return start
        half = 1
        while 2 * half < count:
            half *= 2
        return (plain(start, half), plain(start + half, count - half))

    def faulty_partial(x: Any, weight: Any, *args: Any) -> Any:
        tiles = args[0]
        changed = False
        if tiles == 6:
            import torch

            digest = hashlib.sha256(weight.contiguous().view(torch.int16).numpy()).hexdigest()
            with remembered.open("a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                known = file.read().split()
                # The shards of down_proj with which the run starts: four layers, two ranks.
                if len(known) < 8 and digest not in known:
                    file.write(digest + "\n")
                    known.append(digest)
            changed = digest not in known
        if not changed:
            return partial(x, weight, *args)
        module.run_tree = lambda leaves, run: plain(0, leaves)  # type: ignore[attr-defined]
        try:
            return partial(x, weight, *args)
        finally:
            module.run_tree = original  # type: ignore[attr-defined]

    module.partial = faulty_partial  # type: ignore[attr-defined]


def stale_rollout_weights(module: ModuleType) -> None:
    """Rank 1 of the engine keeps other weights of layer 2's gate and up projection than it was
    given."""
    original: Callable[..., None] = module.load_model

    def load_model(upstream: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        import torch

        original(upstream, runner, *args, **kwargs)
        if module.state.require().ranks.rank == 1:
            weight = runner.model.model.layers[2].mlp.gate_up_proj.weight
            with torch.no_grad():
                weight.copy_((weight.float() * (1 + 2**-6)).to(weight.dtype))

    for hook in module.HOOKS:
        if hook.name == "load_model":
            object.__setattr__(hook, "replacement", load_model)


_FAULTS: dict[str, tuple[str, Callable[[ModuleType], None]]] = {
    "plain_tree_after_training": (
        "megatron_patch.ops.row_linear.reference",
        plain_tree_after_training,
    ),
    "stale_rollout_weights": ("sglang_patch.hooks.model", stale_rollout_weights),
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module as ever, and changes it once it has been executed."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name, self._change = name, change

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_fault = os.environ.get("MILES_TEST_CODE_FAULT")
if _fault is not None:
    sys.meta_path.insert(0, _AfterImport(*_FAULTS[_fault]))
