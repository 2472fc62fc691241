"""A hook names its target, checks that it is the text it was written against, counts its calls."""

from __future__ import annotations

import functools
import hashlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import state


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """An AROUND hook on `target`, a dotted path into SGLang.

    `replacement(original, *args, **kwargs)` decides whether to call the original. `digest` is the
    SHA-256 (16 hex digits) of the source of `checked` (default: the target) in the supported
    release; another text means that the surface moved and the hook must be read again. Without a
    live policy the original runs, unless `always`. `cpu_only` hooks are not installed on a GPU.
    """

    name: str
    target: str
    digest: str
    replacement: Callable[..., Any]
    checked: str | None = None
    always: bool = False
    cpu_only: bool = False

    def resolve(self) -> Callable[..., Any]:
        """The object whose source is checked; `AttributeError` or `ImportError` when it, or the
        target itself, is gone."""
        pkgutil.resolve_name(self.target)
        found = pkgutil.resolve_name(self.checked or self.target)
        # Past our own wrapper and the descriptors, so that a second look sees the original text.
        found = inspect.unwrap(found)
        return getattr(found, "__func__", found)

    def source_digest(self) -> str:
        """Digest of the installed source."""
        return hashlib.sha256(inspect.getsource(self.resolve()).encode()).hexdigest()[:16]

    def wrapper(self) -> Callable[..., Any]:
        """What the registry installs: stock without a policy (unless `always`), else counted."""

        @functools.wraps(self.replacement)
        def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            live = state.active()
            if live is None and not self.always:
                return original(*args, **kwargs)
            if live is not None:
                live.calls[self.name] += 1
            return self.replacement(original, *args, **kwargs)

        return call
