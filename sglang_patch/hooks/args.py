"""`sglang.srt.server_args.ServerArgs`: the contract as an engine argument.

Two dataclass fields are added, `true_on_policy_contract` (`NAME` or `NAME:segments=S`, also as
`--true-on-policy-contract`) and `true_on_policy_fault` (tests). The field is real, so SGLang's own
parser, `from_cli_args` and `dataclasses.asdict` see it; the generated `__init__` is wrapped to
accept it. Upstream surface: `ServerArgs.from_cli_args`, `add_cli_args_from_dataclass`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

from ..schema import CONTRACTS
from .target import Hook

FIELDS = {
    "true_on_policy_contract": "True on-policy contract: NAME or NAME:segments=S, NAME one of "
    + ", ".join(CONTRACTS),
    "true_on_policy_fault": "Flip one ulp at LAYER:OP[:RANK[:TOKEN]] to show that the gate closes.",
}


def add_fields(server_args_class: type) -> None:
    """Add the contract's fields to the dataclass; once."""
    fields = server_args_class.__dataclass_fields__  # type: ignore[attr-defined]
    for name, text in FIELDS.items():
        if name in fields:
            continue
        annotation = Annotated[str | None, text]
        extra = dataclasses.make_dataclass("_Extra", [(name, annotation, None)])
        fields[name] = dataclasses.fields(extra)[0]
        server_args_class.__annotations__[name] = annotation
        setattr(server_args_class, name, None)


def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Take the added fields out of the keywords, then build the arguments as SGLang does."""
    for name in FIELDS:
        object.__setattr__(self, name, kwargs.pop(name, None))
    original(self, *args, **kwargs)


HOOKS = (
    Hook(
        name="server_args",
        target="sglang.srt.server_args.ServerArgs.__init__",
        checked="sglang.srt.server_args.ServerArgs.from_cli_args",
        digest="d6a7b8a38c74e636",
        replacement=init,
        always=True,
    ),
)
