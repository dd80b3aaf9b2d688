"""What an evaluation shows: a bar while it plays, a table at its end."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from sparring.evaluation import EvalEpisode
from sparring.pass_at_k import Estimate, Tries, estimate, pass_at_k, pass_hat_k

__all__ = ["EvalProgress", "print_results"]


class EvalProgress:
    """A bar on a terminal, ten lines elsewhere. A context manager."""

    def __init__(self, console: Console, name: str, episodes: Sequence[EvalEpisode | None], again: int) -> None:
        self._console, self._name, self._total = console, name, len(episodes)
        self._began, self._shown = time.monotonic(), 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task(name, total=self._total)
        self.show(episodes, again)

    def __enter__(self) -> EvalProgress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def show(self, episodes: Sequence[EvalEpisode | None], again: int) -> None:
        """`episodes`: those of the environment, None where one is still to be played; `again`: of these, how many
        failed and have an attempt left."""
        played = [episode for episode in episodes if episode is not None]
        failed = sum(episode.reward is None for episode in played)
        text = f"{self._name}: {sum(e.solved for e in played)} solved" + (f", {failed} failed" if failed else "")
        later = f", {again} to be played again" if again else ""
        self._bar.update(self._task, completed=len(played), description=text + later)
        tenths = 10 * len(played) // self._total
        if not self._console.is_terminal and tenths > self._shown:
            self._shown = tenths
            seconds = time.monotonic() - self._began
            self._console.print(
                f"{text} of {len(played)}/{self._total} played{later}, {seconds:.0f} s", highlight=False
            )


def print_results(console: Console, results: Mapping[str, Sequence[EvalEpisode]], samples: int) -> None:
    """One line for each environment and k; then the failures."""
    table = Table(box=None, pad_edge=False)
    table.add_column("environment")
    headings = ("k", "tasks", "pass@k", "95% interval", "pass^k", "95% interval", "interval by")
    for heading in (*headings, "reward", "tokens", "failed"):
        table.add_column(heading, justify="right")
    for name, episodes in results.items():
        tasks = _by_task(episodes)
        finished = [episode for episode in episodes if episode.reward is not None]
        for k in _ks(samples):
            at, hat = estimate(tasks, k, pass_at_k), estimate(tasks, k, pass_hat_k)
            methods = " / ".join(dict.fromkeys((at.method, hat.method)))
            whole = k == 1
            table.add_row(
                name if whole else "",
                str(k),
                str(at.tasks),
                *_cells(at),
                *_cells(hat),
                methods,
                f"{_mean([e.reward or 0.0 for e in finished]):.3f}" if whole else "",
                f"{_mean([e.completion_tokens for e in finished]):.0f}" if whole else "",
                f"{len(episodes) - len(finished)} of {len(episodes)}" if whole else "",
            )
    console.print(table)
    console.print(
        "Failed episodes count in no rate. Intervals are over tasks: Wilson's of a proportion, else a bootstrap.",
        style="dim",
        highlight=False,
    )
    for name, episodes in results.items():
        failures = [episode.failure for episode in episodes if episode.failure is not None]
        for kind, count in Counter(failure["kind"] for failure in failures).items():
            sample = next(failure["message"] for failure in failures if failure["kind"] == kind)
            console.print(f"{name}: {count} failed by {kind}, such as: {sample[:500]}", highlight=False, markup=False)


def _by_task(episodes: Sequence[EvalEpisode]) -> list[Tries]:
    tries: Counter[str] = Counter({episode.task_id: 0 for episode in episodes})
    solved: Counter[str] = Counter()
    for episode in episodes:
        tries[episode.task_id] += episode.reward is not None
        solved[episode.task_id] += episode.solved
    return [Tries(count, solved[task_id]) for task_id, count in tries.items()]


def _ks(samples: int) -> list[int]:
    powers = [1 << i for i in range(samples.bit_length()) if 1 << i < samples]
    return [*powers, samples]


def _cells(e: Estimate) -> tuple[str, str]:
    return ("-", "-") if math.isnan(e.value) else (f"{e.value:.1%}", f"[{e.low:.1%}, {e.high:.1%}]")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
