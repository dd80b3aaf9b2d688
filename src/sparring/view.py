"""`sparring view RUN`: the episodes of a run, while it goes on or afterwards, and one of them token by token."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparring.backend.buffer import BufferView, EpisodeRow
from sparring.display import open_console
from sparring.fates import fates, legend
from sparring.run_dir import RunDirectory
from sparring.token_tables import make_decoder, show_tokens, show_turns
from sparring.transcript import said
from sparring.types import Trajectory

__all__ = ["view"]

_MESSAGE_WIDTH = 200
_CUT = ", cut"
_CUT_MEANS = (
    "cut: the last answer ended at sampling.max_new_tokens, or at what was left of rollout.max_episode_tokens or "
    "model.max_length"
)
_ROLE_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def view(run: str, episode: str | None, state: str | None, limit: int, tokens: bool) -> int:
    """Print the list of episodes, or one episode whole.

    Raises:
        ConfigError: `run` is no run folder.
        BufferStateError: the buffer cannot be read, or holds no such episode.
    """
    directory = RunDirectory.of(run)
    console = open_console()
    with BufferView(directory.buffer) as buffer:
        if episode is None:
            _list(console, buffer, state, limit)
        elif (row := buffer.episode(episode)).pruned:
            _show_pruned(console, row)
        else:
            trained = buffer.trained_logprobs(episode)
            _show(console, buffer.trajectory(episode), trained, make_decoder(directory.config), tokens)
    return 0


def _list(console: Console, buffer: BufferView, state: str | None, limit: int) -> None:
    headings = ("episode", "task", "state", "step", "reward", "stopped", "turns", "tokens", "version", "seconds")
    table = Table(*headings, box=None, pad_edge=False)
    rows, cut = buffer.episodes(state=state, limit=limit), False
    if any(row.failure_kind for row in rows):
        table.add_column("failure")
    for row in reversed(rows):
        failure = buffer.failure(row)
        stopped = row.failure_kind or (row.stop_reason if row.pruned else _stopped(buffer.trajectory(row.episode_id)))
        cut |= stopped.endswith(_CUT)
        table.add_row(
            row.episode_id,
            row.task_id,
            f"{row.state}, pruned" if row.pruned else row.state,
            _or_dash(row.consumed_step),
            "-" if row.reward is None else f"{row.reward:.3f}",
            stopped,
            str(row.turns),
            str(row.action_tokens),
            _or_dash(row.oldest_version),
            f"{row.finished_at - row.started_at:.1f}",
            *([Text(textwrap.shorten(failure.message, _MESSAGE_WIDTH), style="red")] if failure else []),
        )
    kind = "episodes" if state is None else f"{state} episodes"
    counts = buffer.counts()
    count = sum(counts.values()) if state is None else counts.get(state, 0)
    if rows:
        console.print(table)
        console.print(legend({row.state for row in rows}), style="dim", highlight=False)
    if cut:
        console.print(_CUT_MEANS, style="dim", highlight=False)
    if not count:
        console.print(f"no {kind} yet", highlight=False)
    else:
        shown = f"{len(rows)} of {count} {kind}, the newest; --limit N, --state NAME"
        console.print(shown if len(rows) < count else f"{count} {kind}", highlight=False)
    if count and state is None:
        console.print(f"episodes in all: {fates(counts)}", highlight=False)


def _show_pruned(console: Console, row: EpisodeRow) -> None:
    trained = f" by step {row.consumed_step}" if row.consumed_step is not None else ""
    console.print(
        f"{row.episode_id}  task {row.task_id}  reward {_or_dash(row.reward)}  {row.failure_kind or row.stop_reason}\n"
        f"{row.state}{trained}; {row.turns} turns, {row.action_tokens} sampled tokens, oldest version "
        f"{_or_dash(row.oldest_version)}\n"
        "pruned: its tokens and messages are forgotten, as rollout.keep_steps says",
        highlight=False,
        markup=False,
    )


def _show(
    console: Console,
    trajectory: Trajectory,
    trained: Sequence[NDArray[np.float32]] | None,
    decode: Callable[[int], str],
    tokens: bool,
) -> None:
    head = f"{trajectory.episode_id}  task {trajectory.task_id}  reward {_or_dash(trajectory.reward)}"
    console.print(f"{head}  {dict(trajectory.reward_parts)}  {_stopped(trajectory)}", highlight=False, markup=False)
    if trajectory.failure:
        console.print(Text(f"failure ({trajectory.failure.kind}): {trajectory.failure.message}", style="red"))
    for message in trajectory.messages:
        console.print(Text(f"{message['role']:>9}: {said(message)}", style=_ROLE_STYLES.get(message["role"], "")))
    for index, sequence in enumerate(trajectory.sequences):
        after = trained[index] if trained is not None else None
        show_turns(console, index, sequence, after)
        if tokens:
            show_tokens(console, sequence, after, decode)


def _stopped(trajectory: Trajectory) -> str:
    """Why the episode ended, and whether its last answer was cut short."""
    turns = [turn for sequence in trajectory.sequences[-1:] for turn in sequence.turns]
    return f"{trajectory.stop_reason}{_CUT if turns and turns[-1].finish_reason == 'length' else ''}"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
