"""What a run shows while it runs: a live table on a terminal, one line a step elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from sparring.evaluation import EvalSummary
from sparring.transcript import printable

__all__ = ["Display", "fine_tuning_progress", "open_console"]

_ROWS_SHOWN = 12
_STEPS_AVERAGED = 16  # for the time left
_FRESH_S = 2.0  # the trainer tells twice a second what it waits for: what is older is over
_FIRST_WAIT_S, _LATER_WAIT_S, _LONGEST_WAIT_S = 5.0, 60.0, 300.0  # off a terminal, between two lines about one wait
_LONGEST_COUNT_S = 10.0
_COLUMNS: Mapping[str, tuple[str, str]] = {
    # heading: (metric, format)
    "step": ("step", "{:.0f}"),
    "reward": ("reward", "{:.3f}"),
    "exact": ("reward/exact", "{:.3f}"),
    "lag": ("lag/max", "{:.0f}"),
    "sampler tok/s": ("sampler/tokens_per_s", "{:.0f}"),
    "sampler busy": ("sampler/busy", "{:.0%}"),
    "trainer tok/s": ("trainer/tokens_per_s", "{:.0f}"),
    "trainer busy": ("trainer/busy", "{:.0%}"),
    "ess": ("ess", "{:.2f}"),
    "groups dropped": ("groups/dropped", "{:.0f}"),
    "episodes failed": ("failures", "{:.0f}"),
    "s": ("time/step_s", "{:.1f}"),
    "time left": ("left", "{}"),
}
_LEGEND = (
    "lag: updates between sampling and training, the most of the step; busy: share of the time that an episode ran, or "
    "that the trainer did not wait; ess: effective sample size, as a share of the tokens (1: all weigh alike)"
)


class _PrintableConsole(Console):
    """Whatever is said in a text, the terminal hears no control character but those of the console itself."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def open_console(*, plain_width: int = 160) -> Console:
    """Standard output, as it is said: brackets and colons in it are no markup, and control characters are shown as
    escapes. Wide where it is no terminal, so that a table's lines stay whole.
    """
    console = _PrintableConsole(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = plain_width
    return console


class Display:
    """A context manager; every method is cheap and may be called from the trainer's thread alone.

    Args:
        clock: seconds, from anywhere.
    """

    def __init__(
        self, total_steps: int, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._clock = console or open_console(), clock
        self._total = total_steps
        self._rows: list[Mapping[str, Any]] = []
        self._evaluations: list[EvalSummary] = []
        self._status = "starting"
        self._waiting = ("", -math.inf)  # for what, and when that was told
        self._next_line, self._interval = -math.inf, _FIRST_WAIT_S
        terminal = self._console.is_terminal
        self._live = (
            Live(console=self._console, refresh_per_second=4, get_renderable=self._picture) if terminal else None
        )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._waiting = ("", -math.inf)
            self._live.stop()

    def status(self, text: str) -> None:
        """What the run is doing now, where that is not a training step."""
        self._status = text
        self._show(text)

    def counting(self, what: str) -> Callable[[int, int], None]:
        """The run does `what` now. Gives what to call twice a second while the trainer waits for its end, with how many
        episodes have ended of how many: as `waiting`, but a line every ten seconds."""
        self.status(what)
        began = self._clock()

        def show(done: int, total: int) -> None:
            seconds = self._clock() - began
            self.waiting(f"{what}: {done} of {total} episodes, {seconds:.0f} s", longest_s=_LONGEST_COUNT_S)

        return show

    def waiting(self, text: str, *, longest_s: float = _LONGEST_WAIT_S) -> None:
        """What the trainer waits for; told twice a second as long as it does. Off a terminal seldom a line of it.

        Args:
            longest_s: from one line to the next.
        """
        now = self._clock()
        if now - self._waiting[1] >= _FRESH_S:  # another wait begins
            self._next_line = max(self._next_line, now + _FIRST_WAIT_S)
        self._next_line = min(self._next_line, now + longest_s)
        self._waiting = (text, now)
        if self._live or now < self._next_line:
            return
        self._console.print(text, highlight=False, soft_wrap=True)
        self._interval = min(2 * self._interval, longest_s)
        self._next_line = now + self._interval

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show a record of `metrics.jsonl`; evaluations come through `evaluation`."""
        if metrics["kind"] != "step":
            return
        if not self._rows:  # not before, or the lines of a start would stand between it and the rows
            self._console.print(_LEGEND, style="dim", highlight=False, soft_wrap=True)
            if not self._live:
                self._console.print(_line(list(_COLUMNS)), highlight=False)
        self._rows.append({**metrics, "left": self._time_left(metrics)})
        self._status = f"training, step {metrics['step']:.0f} of {self._total}, {self._rows[-1]['left']} left"
        self._show(_line(_cells(self._rows[-1])))
        self._next_line, self._interval = self._clock() + _LATER_WAIT_S, _LATER_WAIT_S

    def evaluation(self, summary: EvalSummary) -> None:
        self._evaluations.append(summary)
        self._show(_evaluation_line(summary))

    def _time_left(self, metrics: Mapping[str, Any]) -> str:
        """As the last steps went, evaluations and what follows the last step aside."""
        recent = [row["time/step_s"] for row in [*self._rows, metrics][-_STEPS_AVERAGED:] if "time/step_s" in row]
        seconds = sum(recent) / max(len(recent), 1) * (self._total - metrics["step"])
        return str(timedelta(seconds=round(seconds))) if recent else "-"

    def _show(self, line: str) -> None:
        """Draw the picture anew, or print its newest line where there is none."""
        if self._live:
            self._live.refresh()
        else:
            self._console.print(line, highlight=False)

    def _picture(self) -> Group:
        headings = list(_COLUMNS)[:-1]  # the time left stands below: columns are narrow on a terminal
        table = Table(*headings, box=None, pad_edge=False, header_style="bold")
        for column in table.columns:
            column.justify = "right"
        for row in self._rows[-_ROWS_SHOWN:]:
            table.add_row(*_cells(row)[:-1])
        lines = [Text(_evaluation_line(summary), style="green") for summary in self._evaluations]
        text, told_at = self._waiting
        now = text if self._clock() - told_at < _FRESH_S else self._status
        return Group(table, *lines, Text(now, style="dim"))


@contextmanager
def fine_tuning_progress(
    console: Console, steps: int, what: str = "supervised"
) -> Iterator[Callable[[int, float], None]]:
    """Gives what to call after every step, numbered from 0, with its loss: a bar, or eleven lines off a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=steps)

        def show(step: int, loss: float) -> None:
            progress.update(task, advance=1, description=f"{what}, loss {loss:.3f}")
            if not console.is_terminal and (step == 0 or (step + 1) % max(1, steps // 10) == 0):
                console.print(f"{what} step {step + 1} of {steps}, loss {loss:.3f}", highlight=False)

        yield show


def _line(cells: Sequence[str]) -> str:
    """Cells right under their headings."""
    return "  ".join(f"{cell:>{max(len(heading), 7)}}" for cell, heading in zip(cells, _COLUMNS, strict=True))


def _cells(metrics: Mapping[str, Any]) -> list[str]:
    return [form.format(metrics[key]) if key in metrics else "-" for key, form in _COLUMNS.values()]


def _evaluation_line(summary: EvalSummary) -> str:
    failed = f", {summary.failed} failed" if summary.failed else ""
    return (
        f"held-out, step {summary.step}: {summary.success:.1%} solved "
        f"[{summary.low:.1%}, {summary.high:.1%}] of {summary.episodes} tasks{failed}"
    )
