"""What a person sees: a live view on a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from ..parity.report import Report, StepReport


def step_table(report: Report) -> Table:
    """One row a step: tokens compared, differing, the largest difference, reward, gradient norm."""
    table = Table(title=f"{report.model}: rollout logprob - trainer logprob", title_style="bold")
    for name in ("step", "tokens", "differ", "max |diff|", "reward", "grad norm", "weights", "s"):
        table.add_column(name, justify="right" if name != "weights" else "center")
    for step in report.steps:
        table.add_row(*_cells(step), style=None if step.mismatched_tokens == 0 else "red")
    return table


def _cells(step: StepReport) -> list[str]:
    digests = {side: digest for side, digest in step.weights_digest.items() if digest}
    equal = len(digests) == 2 and len(set(digests.values())) == 1
    return [
        str(step.step),
        str(step.compared_tokens),
        str(step.mismatched_tokens),
        "0.0" if step.max_abs_diff == 0 else f"{step.max_abs_diff:.3g}",
        "-" if step.reward_mean is None else f"{step.reward_mean:.4f}",
        "-" if step.grad_norm is None else f"{step.grad_norm:.4f}",
        next(iter(digests.values()))[:8] if equal else "-",
        f"{sum(step.seconds.values()):.1f}",
    ]


class Progress:
    """Tells what runs now and for how long. On a terminal it redraws in place."""

    def __init__(
        self, report: Report, console: Console | None = None, *, steps: bool = True
    ) -> None:
        """steps: whether the run counts training steps."""
        self.console = console or Console(highlight=False)
        self._report, self._steps = report, steps
        self._bar: ProgressBar | None = None
        self._phase = ""
        self._since = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live = Live(
                get_renderable=self._render,
                console=self.console,
                refresh_per_second=4,
                transient=True,
            )
            self._live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*exception)
            self._live = None

    def _render(self) -> Table:
        grid = Table.grid()
        if self._report.steps:
            grid.add_row(step_table(self._report))
        text = f" {self._phase} ({time.monotonic() - self._since:.0f} s)"
        if self._steps:
            done = sum(step.complete for step in self._report.steps)
            text += f"   {done} of {self._report.steps_planned} steps done"
        if self._bar is not None:
            text += f"   {self._bar.completed:.0f} of {self._bar.total:.0f}"
        grid.add_row(Spinner("dots", text))
        if self._bar is not None:
            grid.add_row(self._bar)
        return grid

    @contextmanager
    def counting(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        """Show how many of `total` are done; the body calls what it is given after each. Off a
        terminal, a line at every tenth part."""
        self._phase, self._since = name, time.monotonic()
        self._bar = bar = ProgressBar(total=total, width=40)

        def advance() -> None:
            bar.update(bar.completed + 1)
            part = max(1, total // 10)
            if not self.console.is_terminal and (bar.completed % part == 0):
                self.say(f"{name}: {bar.completed:.0f} of {total}")

        try:
            yield advance
        finally:
            self._bar = None

    @contextmanager
    def phase(self, name: str, seconds: dict[str, float], key: str) -> Iterator[None]:
        """Show `name` while the body runs, and add its seconds to `seconds[key]`."""
        self._phase, self._since = name, time.monotonic()
        try:
            yield
        finally:
            seconds[key] = seconds.get(key, 0.0) + round(time.monotonic() - self._since, 3)

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, soft_wrap=True)

    def step_done(self, step: StepReport) -> None:
        """On a terminal the table shows it; elsewhere one line a step."""
        if not self.console.is_terminal:
            cells = _cells(step)
            self.say(
                f"step {cells[0]}: {cells[1]} tokens, {cells[2]} differ, max |diff| {cells[3]}, "
                f"reward {cells[4]}, grad norm {cells[5]}, {cells[7]} s"
            )


def show_end(report: Report, console: Console, report_path: Any) -> None:
    """The final table and one sentence."""
    if report.steps:
        console.print(step_table(report))
    compared, mismatched, largest = report.totals()
    if report.ok:
        console.print(
            f"[bold green]exact[/]: {compared} response tokens compared, 0 differ; "
            f"report: {report_path}"
        )
        return
    console.print(f"[bold red]{report.ended}[/]: ", end="")
    console.print(report.message, markup=False, soft_wrap=True)
    console.print(
        f"{compared} tokens compared, {mismatched} differ, max |diff| {largest:.3g}; "
        f"report: {report_path}"
    )
