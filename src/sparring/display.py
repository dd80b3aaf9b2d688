"""What a run shows while it runs: a live table on a terminal, one line a step elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from sparring.evaluation import EvalSummary

__all__ = ["Display", "open_console", "supervised_progress"]

_ROWS_SHOWN = 12
_COLUMNS: Mapping[str, tuple[str, str]] = {
    # heading: (metric, format)
    "step": ("step", "{:.0f}"),
    "reward": ("reward", "{:.3f}"),
    "exact": ("reward/exact", "{:.3f}"),
    "lag": ("lag/max", "{:.0f}"),
    "sampler tok/s": ("sampler/tokens_per_s", "{:.0f}"),
    "busy": ("sampler/busy", "{:.0%}"),
    "trainer tok/s": ("trainer/tokens_per_s", "{:.0f}"),
    "busy ": ("trainer/busy", "{:.0%}"),
    "ess": ("ess", "{:.2f}"),
    "dropped": ("groups/dropped", "{:.0f}"),
    "failed": ("failures", "{:.0f}"),
    "s": ("time/step_s", "{:.1f}"),
}


def open_console(*, plain_width: int = 160) -> Console:
    """Standard output, as it is said: brackets and colons in it are no markup. Wide where it is no terminal, so that a
    table's lines stay whole.
    """
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = plain_width
    return console


class Display:
    """A context manager; every method is cheap and may be called from the trainer's thread alone."""

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self._console = console or open_console()
        self._total = total_steps
        self._rows: list[Mapping[str, Any]] = []
        self._evaluations: list[EvalSummary] = []
        self._status = "starting"
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._refresh()
            self._live.stop()

    def status(self, text: str) -> None:
        """What the run is doing now, where that is not a training step."""
        self._status = text
        if self._live:
            self._refresh()
        else:
            self._console.print(text, highlight=False)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show a record of `metrics.jsonl`; evaluations come through `evaluation`."""
        if metrics["kind"] != "step":
            return
        if not self._live and not self._rows:  # not before, or the lines of a start would stand between it and the rows
            self._console.print("  ".join(f"{heading:>9}" for heading in _COLUMNS), highlight=False)
        self._rows.append(metrics)
        self._status = f"training, step {metrics['step']:.0f} of {self._total}"
        if self._live:
            self._refresh()
        else:
            self._console.print("  ".join(f"{cell:>9}" for cell in _cells(metrics)), highlight=False)

    def evaluation(self, summary: EvalSummary) -> None:
        self._evaluations.append(summary)
        if self._live:
            self._refresh()
        else:
            self._console.print(_evaluation_line(summary), highlight=False)

    def _refresh(self) -> None:
        assert self._live is not None
        table = Table(*_COLUMNS, box=None, pad_edge=False, header_style="bold")
        for column in table.columns:
            column.justify = "right"
        for row in self._rows[-_ROWS_SHOWN:]:
            table.add_row(*_cells(row))
        lines = [Text(_evaluation_line(summary), style="green") for summary in self._evaluations]
        self._live.update(Group(table, *lines, Text(self._status, style="dim")))


@contextmanager
def supervised_progress(console: Console, steps: int) -> Iterator[Callable[[int, float], None]]:
    """Gives what to call after every supervised step with its number and loss: a bar, or ten lines off a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("supervised", total=steps)

        def show(step: int, loss: float) -> None:
            progress.update(task, advance=1, description=f"supervised, loss {loss:.3f}")
            if not console.is_terminal and (step + 1) % max(1, steps // 10) == 0:
                console.print(f"supervised step {step + 1} of {steps}, loss {loss:.3f}", highlight=False)

        yield show


def _cells(metrics: Mapping[str, Any]) -> list[str]:
    return [form.format(metrics[key]) if key in metrics else "-" for key, form in _COLUMNS.values()]


def _evaluation_line(summary: EvalSummary) -> str:
    failed = f", {summary.failed} failed" if summary.failed else ""
    return (
        f"held-out, step {summary.step}: {summary.success:.1%} solved "
        f"[{summary.low:.1%}, {summary.high:.1%}] of {summary.episodes} tasks{failed}"
    )
