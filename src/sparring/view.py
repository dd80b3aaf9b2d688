"""`sparring view RUN`: the episodes of a run, while it goes on or afterwards, and one of them token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparring.backend.buffer import BufferView
from sparring.config_file import load_config
from sparring.errors import ConfigError, SparringError
from sparring.run_dir import RunDirectory
from sparring.types import TokenSequence, Trajectory

__all__ = ["view"]

_ROLE_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def view(run: str, episode: str | None, state: str | None, limit: int, tokens: bool) -> int:
    """Print the list of episodes, or one episode whole.

    Raises:
        ConfigError: `run` is no run folder.
        BufferStateError: the buffer cannot be read, or holds no such episode.
    """
    directory = RunDirectory(Path(run))
    if not directory.buffer.is_file():
        raise ConfigError(f"{run} is no run folder: it holds no {directory.buffer.name}")
    console = Console()
    if not console.is_terminal:
        console.width = 160
    with BufferView(directory.buffer) as buffer:
        if episode is None:
            _list(console, buffer, state, limit)
        else:
            trained = buffer.trained_logprobs(episode)
            _show(console, buffer.trajectory(episode), trained, _decoder(directory), tokens)
    return 0


def _list(console: Console, buffer: BufferView, state: str | None, limit: int) -> None:
    headings = ("episode", "task", "state", "step", "reward", "stopped", "turns", "tokens", "version", "seconds")
    table = Table(*headings, box=None, pad_edge=False)
    for row in reversed(buffer.episodes(state=state, limit=limit)):
        table.add_row(
            row.episode_id,
            row.task_id,
            row.state,
            _or_dash(row.consumed_step),
            "-" if row.reward is None else f"{row.reward:.3f}",
            row.failure_kind or row.stop_reason,
            str(row.turns),
            str(row.action_tokens),
            _or_dash(row.oldest_version),
            f"{row.finished_at - row.started_at:.1f}",
        )
    console.print(table)


def _show(
    console: Console,
    trajectory: Trajectory,
    trained: Sequence[NDArray[np.float32]] | None,
    decode: Callable[[int], str],
    tokens: bool,
) -> None:
    head = f"{trajectory.episode_id}  task {trajectory.task_id}  reward {_or_dash(trajectory.reward)}"
    console.print(f"{head}  {dict(trajectory.reward_parts)}  {trajectory.stop_reason}", highlight=False, markup=False)
    if trajectory.failure:
        console.print(Text(f"failure ({trajectory.failure.kind}): {trajectory.failure.message}", style="red"))
    for message in trajectory.messages:
        said = [message.get("content") or ""]
        said += [f"{c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls", ())]
        text = "\n".join(filter(None, said))
        console.print(Text(f"{message['role']:>9}: {text}", style=_ROLE_STYLES.get(message["role"], "")))
    for index, sequence in enumerate(trajectory.sequences):
        after = trained[index] if trained is not None else None
        _show_turns(console, index, sequence, after)
        if tokens:
            _show_tokens(console, sequence, after, decode)


def _show_turns(console: Console, index: int, sequence: TokenSequence, after: NDArray[np.float32] | None) -> None:
    table = Table("turn", "agent", "tokens", "trained", "finish", "versions", "mean log p", "mean ratio", box=None)
    table.title = f"sequence {index}: {len(sequence)} tokens, {int(sequence.action_mask.sum())} of them actions"
    table.title_justify = "left"
    for number, turn in enumerate(sequence.turns):
        span = slice(turn.start, turn.end)
        mask = sequence.action_mask[span]
        versions = sorted({int(v) for v in sequence.policy_versions[span][mask]})
        logprobs = sequence.behaviour_logprobs[span][mask]
        ratios = [_ratio(sequence, after, i) for i in range(turn.start, turn.end) if sequence.action_mask[i]]
        known = [r for r in ratios if r is not None]
        table.add_row(
            str(number),
            turn.agent_id,
            f"{turn.start}..{turn.end}",
            str(int(mask.sum())),
            turn.finish_reason,
            ",".join(map(str, versions)) or "-",
            f"{logprobs.mean():.3f}" if len(logprobs) else "-",
            f"{sum(known) / len(known):.3f}" if known else "-",
        )
    console.print(table)


def _show_tokens(
    console: Console, sequence: TokenSequence, after: NDArray[np.float32] | None, decode: Callable[[int], str]
) -> None:
    table = Table("#", "token", "id", "mask", "log p", "ratio", "version", box=None)
    for i, (token, mask) in enumerate(zip(sequence.token_ids.tolist(), sequence.action_mask.tolist(), strict=True)):
        ratio = _ratio(sequence, after, i) if mask else None
        sampled = (f"{sequence.behaviour_logprobs[i]:.3f}", str(sequence.policy_versions[i])) if mask else ("", "")
        table.add_row(
            str(i),
            Text(repr(decode(token))),
            str(token),
            "1" if mask else "0",
            sampled[0],
            "" if ratio is None else f"{ratio:.3f}",
            sampled[1],
        )
    console.print(table)


def _ratio(sequence: TokenSequence, after: NDArray[np.float32] | None, index: int) -> float | None:
    """ρ of one token: the trained policy's probability, when the token was trained, over the behaviour policy's."""
    if after is None:
        return None
    return math.exp(float(after[index]) - float(sequence.behaviour_logprobs[index]))


def _decoder(directory: RunDirectory) -> Callable[[int], str]:
    from tokenizers import Tokenizer

    from sparring.backend.models import resolve_model

    try:
        folder = resolve_model(load_config(directory.config).config.model.path)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except (SparringError, OSError):  # the model has gone: the ids must do
        return lambda token: f"<{token}>"
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
