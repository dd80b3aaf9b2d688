"""Tables of a token sequence: its turns, and its tokens one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparring.backend.models import resolve_model
from sparring.backend.trainer.rejected import importance_ratios
from sparring.config_file import load_config
from sparring.errors import SparringError
from sparring.types import TokenSequence

__all__ = ["make_decoder", "show_tokens", "show_turns"]

Floats = NDArray[np.floating]


def show_turns(console: Console, index: int, sequence: TokenSequence, after: Floats | None) -> None:
    """
    Args:
        after: the trained policy's log-probabilities, (T,), where the sequence was trained.
    """
    ratios = importance_ratios(sequence, after)
    table = Table("turn", "agent", "tokens", "trained", "finish", "versions", "mean log p", "mean ratio", box=None)
    table.title = f"sequence {index}: {len(sequence)} tokens, {int(sequence.action_mask.sum())} of them actions"
    table.title_justify = "left"
    for number, turn in enumerate(sequence.turns):
        span = slice(turn.start, turn.end)
        mask = sequence.action_mask[span]
        versions = sorted({int(v) for v in sequence.policy_versions[span][mask]})
        logprobs = sequence.behaviour_logprobs[span][mask]
        table.add_row(
            str(number),
            turn.agent_id,
            f"{turn.start}..{turn.end}",
            str(int(mask.sum())),
            turn.finish_reason,
            ",".join(map(str, versions)) or "-",
            f"{logprobs.mean():.3f}" if len(logprobs) else "-",
            f"{ratios[span][mask].mean():.3f}" if ratios is not None and mask.any() else "-",
        )
    console.print(table)


def show_tokens(
    console: Console,
    sequence: TokenSequence,
    after: Floats | None,
    decode: Callable[[int], str],
    advantages: Floats | None = None,
) -> None:
    """One line a token. What is not finite is red.

    Args:
        advantages: (T,), where they are known.
    """
    ratios = importance_ratios(sequence, after)
    columns = {"log p": sequence.behaviour_logprobs, "trained log p": after, "ratio": ratios, "advantage": advantages}
    known = {name: values for name, values in columns.items() if values is not None}
    table = Table("#", "token", "id", "mask", *known, "version", box=None)
    for i, (token, mask) in enumerate(zip(sequence.token_ids.tolist(), sequence.action_mask.tolist(), strict=True)):
        cells = [_number(float(values[i])) if mask else Text("") for values in known.values()]
        version = str(sequence.policy_versions[i]) if mask else ""
        table.add_row(str(i), Text(repr(decode(token))), str(token), "1" if mask else "0", *cells, version)
    console.print(table)


def make_decoder(config: Path) -> Callable[[int], str]:
    """Text of a token id, by the tokenizer of the model that the run's configuration names."""
    from tokenizers import Tokenizer

    try:
        folder = resolve_model(load_config(config).config.model.path)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except (SparringError, OSError):  # the model has gone: the ids must do
        return lambda token: f"<{token}>"
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)


def _number(value: float) -> Text:
    return Text(f"{value:.3f}", style="" if np.isfinite(value) else "bold red")
