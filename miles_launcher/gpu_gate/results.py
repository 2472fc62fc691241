"""What the gate found, as JSON: one file a configuration, an index over all, and the verdict.

`<name>.json` is rewritten after every group, so that what was found survives a killed run; a later
run goes on with the groups that are missing, as long as text, versions and machine are the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

INDEX_FILE = "gate.json"
# Groups that sample the same in every configuration of the same numbers.
SAMPLED_ALIKE = ("prompts", "temperature", "cache")
# TP=1 and TP=2 add the same fp32 numbers; what may differ is the last rounding of a few sums.
GRAD_NORM_TOLERANCE = 2.0**-20


@dataclass(slots=True, kw_only=True)
class GroupResult:
    """One group. `failures`: what was not as it has to be, beside the tokens; empty if all was.

    `digest`: SHA-256 (hex) of the sampled tokens and their logprobs, where another configuration
    must have sampled the same. `facts`: what else was measured.
    """

    name: str
    control: bool
    compared_tokens: int = 0
    mismatched_tokens: int = 0
    max_abs_diff: float | str = 0.0
    digest: str | None = None
    failures: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    first_mismatches: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def problems(self, min_tokens: int) -> list[str]:
        """Why this group closes the gate; empty where it does not."""
        found = list(self.failures)
        if self.control:
            if not self.compared_tokens:
                found.append("a control compared no token")
            elif not self.mismatched_tokens:
                found.append(f"a control is exact over {self.compared_tokens} tokens")
            return found
        if self.mismatched_tokens:
            found.append(
                f"{self.mismatched_tokens} of {self.compared_tokens} tokens differ, at most by "
                f"{self.max_abs_diff}"
            )
        if self.compared_tokens < max(1, min_tokens):
            found.append(f"{self.compared_tokens} tokens compared, at least {min_tokens} needed")
        return found


@dataclass(slots=True, kw_only=True)
class ConfigurationResult:
    """One configuration. `identity`: what must be the same for its results to be taken over.
    `ended`: `complete`, `running`, `refused`, or how it failed."""

    name: str
    layout: dict[str, int]
    contract: str
    control: bool
    identity: dict[str, Any]
    versions: dict[str, str | None]
    ended: str = "running"
    message: str = ""
    fingerprint: dict[str, Any] = field(default_factory=dict)
    start_seconds: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    groups: list[GroupResult] = field(default_factory=list)

    def group(self, name: str) -> GroupResult | None:
        """The result of a group, or None."""
        return next((g for g in self.groups if g.name == name), None)

    def write(self, out: Path) -> Path:
        """Write `<name>.json` into `out`, whole or not at all."""
        return write_json(out / f"{self.name}.json", asdict(self))


def write_json(path: Path, data: Any) -> Path:
    """Write a JSON file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    temporary.rename(path)
    return path


def read_result(out: Path, name: str) -> ConfigurationResult | None:
    """What an earlier run left of a configuration; None where there is nothing whole."""
    path = out / f"{name}.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        groups = [GroupResult(**group) for group in data.pop("groups")]
        return ConfigurationResult(**data, groups=groups)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def reusable(
    earlier: ConfigurationResult | None, identity: Mapping[str, Any], min_tokens: int
) -> list[GroupResult]:
    """The groups of an earlier run that need not run again: same identity, and as they must be."""
    if earlier is None or earlier.identity != dict(identity):
        return []
    return [group for group in earlier.groups if not group.problems(min_tokens)]


def entries(results: Iterable[ConfigurationResult]) -> list[dict[str, Any]]:
    """The `configurations` of the index, one a group."""
    found = []
    for result in results:
        for group in result.groups:
            data = {f.name: getattr(group, f.name) for f in fields(GroupResult)}
            found.append(
                {
                    **data,
                    "name": f"{result.name}:{group.name}",
                    "layout": result.layout,
                    "contract": result.contract,
                    "versions": result.versions,
                }
            )
    return found


def cross_checks(results: Sequence[ConfigurationResult]) -> list[dict[str, Any]]:
    """What holds between configurations: the same prompts give the same tokens and logprobs
    wherever contract and number of segments agree (layout, engines, cache, graphs and chunks may
    differ), and the gradient of the same batch has the same norm. Each: `name`, `ok`, `detail`."""
    checks = []
    exact = [r for r in results if not r.control]
    for name in SAMPLED_ALIKE:
        sampled: dict[tuple[Any, ...], dict[str, str]] = {}
        for result in exact:
            group = result.group(name)
            if group is not None and group.digest is not None:
                key = _numbers(result)
                sampled.setdefault(key, {})[result.name] = group.digest
        for key, digests in sampled.items():
            if len(digests) > 1:
                checks.append(
                    {
                        "name": f"{name}: the same tokens and logprobs, {_say(key)}",
                        "ok": len(set(digests.values())) == 1,
                        "detail": ", ".join(f"{n} {d[:12]}" for n, d in digests.items()),
                    }
                )
    norms: dict[tuple[Any, ...], dict[str, float]] = {}
    for result in exact:
        group = result.group("training")
        if group is not None and "grad_norm" in group.facts:
            norms.setdefault(_numbers(result), {})[result.name] = group.facts["grad_norm"]
    for key, found in norms.items():
        if len(found) > 1:
            low, high = min(found.values()), max(found.values())
            checks.append(
                {
                    "name": f"grad_norm of one batch, {_say(key)}",
                    "ok": high - low <= GRAD_NORM_TOLERANCE * high,
                    "detail": ", ".join(f"{n} {value!r}" for n, value in found.items()),
                }
            )
    return checks


def _numbers(result: ConfigurationResult) -> tuple[Any, ...]:
    """What sets the numbers: two configurations with equal ones have the same logprobs."""
    return (result.identity["model"], result.contract, result.identity["order"])


def _say(key: tuple[Any, ...]) -> str:
    return f"{key[0]}, {key[1]}, {key[2]}"


def verdict(
    results: Sequence[ConfigurationResult], checks: Sequence[Mapping[str, Any]], min_tokens: int
) -> list[str]:
    """Every reason why the gate is closed; empty: it is open. Groups that are missing are not named
    here, and a run that showed nothing at all is closed."""
    found = [
        f"{result.name}:{group.name}: {problem}"
        for result in results
        for group in result.groups
        for problem in group.problems(min_tokens)
    ]
    found += [f"{c['name']}: not the same: {c['detail']}" for c in checks if not c["ok"]]
    if not any(g.compared_tokens for r in results if not r.control for g in r.groups):
        found.append("no token was compared: nothing was shown")
    return found
