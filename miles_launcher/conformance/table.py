"""The table op by property, with rich where it is installed and as plain text where it is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .properties import PROPERTIES, Result, Status

_MARKS: Mapping[Status, str] = {
    Status.OK: "ok",
    Status.FAILED: "FAILED",
    Status.NOT_SHOWN: "not shown",
    Status.NOT_APPLICABLE: "—",
}
_STYLES: Mapping[Status, str] = {
    Status.OK: "green",
    Status.FAILED: "bold red",
    Status.NOT_SHOWN: "yellow",
    Status.NOT_APPLICABLE: "dim",
}
_PIPED_WIDTH = 150


def rows(results: Sequence[Result]) -> dict[str, dict[str, Result]]:
    """The results by op and property."""
    table: dict[str, dict[str, Result]] = {}
    for result in results:
        table.setdefault(result.op, {})[result.property] = result
    return table


def _summary(op: str, cells: Mapping[str, Result]) -> str:
    """One line when an op is done."""
    counts = [
        f"{number} {status.value}"
        for status in (Status.OK, Status.FAILED, Status.NOT_SHOWN)
        if (number := sum(cell.status is status for cell in cells.values()))
    ]
    seconds = sum(cell.seconds for cell in cells.values())
    return f"{op}: {', '.join(counts)} ({seconds:.1f} s)"


class PlainView:
    """Lines on standard output, for a pipe and for a host without rich."""

    def __init__(self) -> None:
        self._results: list[Result] = []

    def begin(self, names: Sequence[str], title: str) -> None:
        self._total = len(names)
        self.line(title)

    def started(self, op: str, name: str) -> None:
        pass

    def finished(self, result: Result) -> None:
        self._results.append(result)
        if result.status in (Status.FAILED, Status.NOT_SHOWN):
            self.line(
                f"  {result.op} {result.property}: {result.status.value}: {result.detail.strip()}"
            )
        if result.property == list(PROPERTIES)[-1]:
            table = rows(self._results)
            self.line(f"[{len(table)}/{self._total}] {_summary(result.op, table[result.op])}")

    def end(self, results: Sequence[Result], lines: Sequence[str]) -> None:
        self.table(results)
        for line in lines:
            self.line(line)

    def line(self, text: str) -> None:
        print(text, flush=True)

    def table(self, results: Sequence[Result]) -> None:
        """One line an op, one column a property."""
        width = max(len(name) for name in PROPERTIES) + 1
        head = "".join(name.rjust(width) for name in PROPERTIES)
        self.line(" " * 16 + head)
        for op, cells in rows(results).items():
            marks = [_MARKS[cells[p].status] if p in cells else "" for p in PROPERTIES]
            self.line(op.ljust(16) + "".join(mark.rjust(width) for mark in marks))


class RichView(PlainView):
    """A progress bar on a terminal, and the table in colour."""

    def __init__(self, console: Any = None) -> None:
        super().__init__()
        from rich.console import Console

        self._console = console or Console(highlight=False)
        if console is None and not self._console.is_terminal:
            self._console = Console(highlight=False, width=_PIPED_WIDTH)
        self._progress: Any = None
        self._task: Any = None

    def begin(self, names: Sequence[str], title: str) -> None:
        super().begin(names, title)
        if not self._console.is_terminal:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        self._progress = Progress(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            Elapsed(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=len(names) * len(PROPERTIES))
        self._progress.start()

    def started(self, op: str, name: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, description=f"{op} {name}")

    def finished(self, result: Result) -> None:
        super().finished(result)
        if self._progress is not None:
            self._progress.advance(self._task)

    def end(self, results: Sequence[Result], lines: Sequence[str]) -> None:
        if self._progress is not None:
            self._progress.stop()
        super().end(results, lines)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def table(self, results: Sequence[Result]) -> None:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        table.add_column("op", no_wrap=True)
        for name in PROPERTIES:
            table.add_column(name.replace("_", "\n"), justify="center")
        for op, cells in rows(results).items():
            marks = [
                Text(_MARKS[cells[p].status], style=_STYLES[cells[p].status]) if p in cells else ""
                for p in PROPERTIES
            ]
            table.add_row(op, *marks)
        self._console.print(table)
