"""Data sets in TRL's prompt format: rows with a `prompt`, a string or messages, and columns for reward functions."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparring.errors import ConfigError, TaskError
from sparring.hub import hub_or_cache
from sparring.types import Message

__all__ = ["PromptRow", "load_prompts"]

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class PromptRow:
    """One task.

    Attributes:
        prompt: as the data set has it, which is how reward functions get it.
        messages: what the model is shown; a string is one user message.
        columns: everything but the prompt.
    """

    prompt: str | list[dict[str, Any]]
    messages: tuple[Message, ...]
    columns: Mapping[str, Any]


def load_prompts(source: Any, split: str, name: str | None = None) -> Sequence[PromptRow]:
    """The rows of a split; none where the source has no such split.

    Args:
        source: a JSONL or JSON file (all of it is "train"); a folder with `train.jsonl` and `test.jsonl`; a hub id; or
            rows: a `datasets.Dataset`, a mapping of splits to those, or any sequence of mappings.
        name: configuration of the data set on the hub.

    Raises:
        ConfigError: no such file or data set.
        TaskError: a row that is no prompt; which, and what it lacks.
    """
    if isinstance(source, (str, Path)):
        path = Path(source).expanduser()
        if path.is_dir():
            path, split = path / f"{split}.jsonl", "train"
            return _from_file(path, path.stat().st_mtime_ns) if path.is_file() else ()
        if path.is_file():
            return _from_file(path, path.stat().st_mtime_ns) if split == "train" else ()
        if path.suffix or str(source).count("/") != 1:
            raise ConfigError(f"dataset: there is no file {source}, and it is no hub id")
        return _from_hub(str(source), name, split)
    if isinstance(source, Mapping):
        return load_prompts(source[split], "train") if split in source else ()
    return _Rows(source, "dataset") if split == "train" else ()


class _Rows(Sequence[PromptRow]):
    """Rows that are in memory already, read one by one: environments are made once an episode."""

    def __init__(self, rows: Sequence[Any], where: str) -> None:
        self._given, self._where = rows, where

    def __len__(self) -> int:
        return len(self._given)

    def __getitem__(self, index: Any) -> Any:
        return _row(self._given[index], f"{self._where} row {index}")


@functools.lru_cache(maxsize=16)
def _from_file(path: Path, _modified_ns: int) -> Sequence[PromptRow]:
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".json":
            return [_row(row, f"{path} row {number}") for number, row in enumerate(json.loads(text))]
        # Not splitlines: a JSON string may hold U+2028 and its like as they are.
        numbered = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        return [_row(json.loads(line), f"{path}:{number}") for number, line in numbered]
    except ValueError as error:
        raise TaskError(f"{path} is not JSON: {error}") from error


@functools.cache
def _from_hub(hub_id: str, name: str | None, split: str) -> Sequence[PromptRow]:
    try:
        from datasets import get_dataset_split_names, load_dataset

        with hub_or_cache():
            rows = load_dataset(hub_id, name, split=split) if split in get_dataset_split_names(hub_id, name) else []
    except Exception as error:  # the hub client raises many kinds; each means the same here
        raise ConfigError(f"dataset: {hub_id!r} is no file, and the hub did not give it: {error}") from error
    return _Rows(rows, f"{hub_id} {split}")


def _row(row: Any, where: str) -> PromptRow:
    if not isinstance(row, Mapping) or "prompt" not in row:
        raise TaskError(f"{where} has no 'prompt'")
    prompt = row["prompt"]
    columns = {key: value for key, value in row.items() if key != "prompt"}
    if isinstance(prompt, str) and prompt.strip():
        return PromptRow(prompt, (Message("user", prompt),), columns)
    if isinstance(prompt, list) and prompt:
        return PromptRow(prompt, tuple(_message(part, where) for part in prompt), columns)
    raise TaskError(f"{where}: 'prompt' is a text or a list of messages, not {str(prompt)[:80]!r}")


def _message(part: Any, where: str) -> Message:
    match part:
        case {"role": role, "content": str(content)} if role in _ROLES:
            return Message(role, content)
    raise TaskError(
        f"{where}: a message of 'prompt' has a role ({', '.join(_ROLES)}) and text as content, not {str(part)[:80]}"
    )
