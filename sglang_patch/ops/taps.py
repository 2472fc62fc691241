"""What a tap records while taps are on: one digest per op, tensor, layer and token row.

A token row is named by (sequence, position), not by where it stood in a batch, so that a prefill, a
decode step and a packed micro-batch can be laid beside each other. Sums over the tensor-parallel
shards of a row are left to the reader: a digest is additive in the columns (`digest.row_digests`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .digest import row_digests
from .fault import FINAL_OPS
from .tap_layout import OUTPUT, WHOLE, TapShape, layout_of, tap_columns

__all__ = ["OUTPUT", "KeptRows", "TapLog", "TapShape", "parse_kept", "tap_columns", "tap_name"]

# Streams of rows in a forward pass: every token; those that go through the head; those whose next
# token is scored. In the engine a prefill may score prompt tokens beside the sampled ones.
TOKENS, HEAD, SCORED, PROMPT = STREAMS = ("tokens", "head", "scored", "prompt")
_STREAM_NUMBERS = {name: number for number, name in enumerate(STREAMS)}
_STREAMS = {"lm_head": HEAD, "temperature": SCORED, "logprob": SCORED}
# The trainer widens its embedding and its logits at once, the rollout where it uses them: exactly.
_WIDENED = frozenset(
    {("embedding", OUTPUT), ("input_layernorm", "input"), ("temperature", "input")}
)
_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Rows that are stored whole, tokens being (sequence, position): of every op's output those of
    `outputs`, of the taps named in `taps` theirs as well."""

    outputs: frozenset[tuple[int, int]]
    taps: Mapping[str, frozenset[tuple[int, int]]] = field(default_factory=dict)

    def tokens_of(self, tap: str) -> frozenset[tuple[int, int]]:
        """The tokens whose rows of this tap are stored."""
        more = self.taps.get(tap, frozenset())
        return self.outputs | more if tap.endswith(f".{OUTPUT}") else more


def parse_kept(text: str) -> KeptRows:
    """Read `{"outputs": [[sequence, position], ...], "taps": {TAP: [...]}}`."""
    data = json.loads(text)

    def tokens(pairs: list[list[int]]) -> frozenset[tuple[int, int]]:
        return frozenset((sequence, position) for sequence, position in pairs)

    return KeptRows(
        outputs=tokens(data["outputs"]),
        taps={name: tokens(pairs) for name, pairs in data["taps"].items()},
    )


def tap_name(layer: int | None, op: str, tensor: str = OUTPUT) -> str:
    """`LAYER.OP.TENSOR`, LAYER `final` for the ops that belong to no layer."""
    return f"{'final' if layer is None or op in FINAL_OPS else layer}.{op}.{tensor}"


@dataclass(slots=True)
class _Rows:
    """One tap: digests, and of which rows: (number of the stream, pass, first row)."""

    whole: bool
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    digests: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _Kept:
    columns: torch.Tensor
    tokens: list[tuple[int, int]] = field(default_factory=list)
    bits: list[torch.Tensor] = field(default_factory=list)


class TapLog:
    """The record of one rank. `at` says which tokens the coming rows are, `record` digests them."""

    def __init__(
        self,
        shape: TapShape,
        rank: int = 0,
        size: int = 1,
        *,
        layouts: Mapping[str, torch.Tensor] | None = None,
        kept: KeptRows | None = None,
    ) -> None:
        """layouts: columns of the layouts that stand in another order than the checkpoint's."""
        self._shape, self._rank, self._size, self._kept = shape, rank, size, kept
        self._columns = dict(layouts or {})
        self._passes: dict[str, list[torch.Tensor]] = {}
        self._cursors: dict[str, int] = {}
        self._taps: dict[str, _Rows] = {}
        self._rows: dict[str, _Kept] = {}

    def at(self, tokens: torch.Tensor, **streams: torch.Tensor) -> None:
        """A forward pass begins. tokens: [rows, 2] int64 on the CPU, (sequence, position) of every
        row, sequence -1 where a row is no token of the batch; streams: likewise the rows of `head`,
        `scored` and `prompt`."""
        given = {TOKENS: tokens, **streams}
        for name in STREAMS:
            rows = given.get(name)
            empty = torch.empty((0, 2), dtype=torch.int64)
            self._passes.setdefault(name, []).append(empty if rows is None else rows)
        self._cursors.clear()

    def record(
        self,
        layer: int | None,
        op: str,
        tensor: torch.Tensor,
        name: str = OUTPUT,
        *,
        stream: str | None = None,
        gathered: bool = False,
    ) -> None:
        """tensor: [rows, ...], the result of `op` or, by `name`, what entered it. Reads it and
        changes nothing. gathered: every rank holds the whole row, where the layout is of shards.

        Raises `ValueError` where the rows are not those announced.
        """
        tap = tap_name(layer, op, name)
        rows = tensor.detach().reshape(tensor.shape[0], -1)
        if (op, name) in _WIDENED:
            rows = rows.float()
        layout = layout_of(op, name)
        columns = self._columns_of(layout, rows, gathered)
        whole = gathered or layout in WHOLE
        taken = self._taps.setdefault(tap, _Rows(whole))
        tokens = self._take(tap, stream or _STREAMS.get(op, TOKENS), rows.shape[0])
        taken.digests.append(row_digests(rows, columns))
        if self._kept is not None:
            self._keep(tap, self._kept.tokens_of(tap), rows, columns, tokens)

    def _columns_of(self, layout: str, rows: torch.Tensor, gathered: bool) -> torch.Tensor:
        key = f"{layout} gathered" if gathered else layout
        if key not in self._columns:
            rank, size = (0, 1) if gathered else (self._rank, self._size)
            self._columns[key] = tap_columns(layout, self._shape, rank, size, rows.shape[1])
        columns = self._columns[key] = self._columns[key].to(rows.device)
        return columns

    def _take(self, tap: str, stream: str, count: int) -> torch.Tensor:
        """The tokens of the next `count` rows of this tap in this pass."""
        passes = self._passes.get(stream)
        if passes is None:
            raise ValueError(f"tap {tap}: {count} rows before any pass was announced")
        start = self._cursors.get(f"{tap} {stream}", 0)
        tokens = passes[-1]
        # All tokens pass a layer at once; rows of the head may come in parts.
        if start + count > tokens.shape[0] or (stream == TOKENS and count != tokens.shape[0]):
            raise ValueError(
                f"tap {tap}: {count} rows from row {start} on, where {tokens.shape[0]} tokens were "
                f"announced for {stream}"
            )
        self._cursors[f"{tap} {stream}"] = start + count
        self._taps[tap].spans.append((_STREAM_NUMBERS[stream], len(passes) - 1, start))
        return tokens[start : start + count]

    def _keep(
        self,
        tap: str,
        wanted: frozenset[tuple[int, int]],
        rows: torch.Tensor,
        columns: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        if not wanted:
            return
        store = self._rows.setdefault(tap, _Kept(columns.cpu()))
        for index, (sequence, position) in enumerate(tokens.tolist()):
            if (sequence, position) in wanted:
                store.tokens.append((sequence, position))
                bits = rows[index].contiguous().view(_INTEGERS[rows.element_size()])
                store.bits.append(bits.cpu())

    def dump(self) -> dict[str, Any]:
        """Plain data. `passes`: per stream the [rows, 2] tokens of every forward pass. `taps`: per
        name `whole` (every rank holds the row), `spans` [n, 4] int64 (stream, pass, first row,
        rows) and their `digests` [rows] int64, in the order in which they came. `rows`: per name
        the kept rows, `columns` [width], `tokens` [m, 2], `bits` [m, width] int16 or int32."""
        taps = {}
        for name, taken in self._taps.items():
            spans = [
                (*span, digests.shape[0])
                for span, digests in zip(taken.spans, taken.digests, strict=True)
            ]
            taps[name] = {
                "whole": taken.whole,
                "spans": torch.tensor(spans, dtype=torch.int64).view(-1, 4),
                "digests": torch.cat(taken.digests),
            }
        rows = {
            name: {
                "columns": kept.columns,
                "tokens": torch.tensor(kept.tokens, dtype=torch.int64).view(-1, 2),
                "bits": torch.stack(kept.bits),
            }
            for name, kept in self._rows.items()
            if kept.bits
        }
        return {"passes": self._passes, "taps": taps, "rows": rows}
