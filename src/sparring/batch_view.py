"""`sparring view --batch FILE`: a batch that a run refused to train, and which of its values are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparring.backend.trainer.rejected import RejectedBatch, RejectedSequence, load_batch
from sparring.display import open_console
from sparring.errors import ConfigError
from sparring.run_dir import RunDirectory
from sparring.token_tables import make_decoder, show_tokens, show_turns

__all__ = ["view_batch"]

_PLACES_SHOWN = 4


def view_batch(file: Path, episode: str | None, *, tokens: bool) -> int:
    """Print every sequence of the batch and what is wrong with it, or the sequences of one episode token by token.

    Raises:
        TrainerError: `file` is no such batch.
        ConfigError: it holds no such episode.
    """
    batch = load_batch(file)
    console = open_console(plain_width=180)
    console.print(Text(batch.problem, style="red"), soft_wrap=True)
    if episode is None:
        _list(console, batch)
    else:
        _show(console, batch, episode, file)
    if tokens and episode is None:
        for found in dict.fromkeys(s.episode_id for s in batch.sequences):
            _show(console, batch, found, file)
    return 0


def _list(console: Console, batch: RejectedBatch) -> None:
    odd_metrics = _odd(batch.record)
    if odd_metrics:
        console.print(Text("not finite in the step's metrics: " + ", ".join(odd_metrics)), soft_wrap=True)
    headings = ("#", "episode", "task", "reward", "tokens", "actions", "log p", "trained log p", "ratio", "advantage")
    table = Table(*headings, "not finite, at tokens", box=None, pad_edge=False)
    for index, sequence in enumerate(batch.sequences):
        table.add_row(
            str(index),
            sequence.episode_id,
            sequence.task_id,
            "-" if sequence.reward is None else f"{sequence.reward:g}",
            str(len(sequence.tokens)),
            str(int(sequence.tokens.action_mask.sum())),
            _mean(sequence, sequence.tokens.behaviour_logprobs),
            _mean(sequence, sequence.logprobs),
            _mean(sequence, sequence.ratios),
            _mean(sequence, sequence.advantages),
            Text("; ".join(f"{name} {_places(where)}" for name, where in sequence.not_finite().items()), style="red"),
        )
    console.print(table)
    console.print("log p, ratio and advantage are means over the action tokens", style="dim")
    if not any(sequence.not_finite() for sequence in batch.sequences):
        console.print(
            "No token of it has a value that is not finite: what is not lies behind them, in the loss, its gradient or "
            "a metric.",
            soft_wrap=True,
        )


def _show(console: Console, batch: RejectedBatch, episode: str, file: Path) -> None:
    sequences = [s for s in batch.sequences if s.episode_id == episode]
    if not sequences:
        raise ConfigError(f"{file} holds no episode {episode!r}: `sparring view --batch {file}` lists those it holds")
    decode = make_decoder(RunDirectory(file.parent).config)
    for index, sequence in enumerate(sequences):
        console.print(f"\n{episode}  task {sequence.task_id}  reward {sequence.reward}", highlight=False, markup=False)
        show_turns(console, index, sequence.tokens, sequence.logprobs)
        show_tokens(console, sequence.tokens, sequence.logprobs, decode, sequence.advantages)


def _odd(record: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} is {value}" for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)
    ]


def _mean(sequence: RejectedSequence, values: NDArray[np.floating] | None) -> str:
    if values is None or not sequence.tokens.action_mask.any():
        return "-"
    with np.errstate(invalid="ignore", over="ignore"):
        return f"{values[sequence.tokens.action_mask].mean():.3f}"


def _places(where: Sequence[int]) -> str:
    more = len(where) - _PLACES_SHOWN
    return ", ".join(map(str, where[:_PLACES_SHOWN])) + (f" and {more} more" if more > 0 else "")
