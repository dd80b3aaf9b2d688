"""The file of an evaluation: a line that says what is evaluated, then a line an episode, in the order of their ends."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from sparring.errors import ConfigError
from sparring.evaluation import EvalEpisode
from sparring.outputs import writing

__all__ = ["EvalLog"]

_BEGINNING = '{"evaluation": '


class EvalLog:
    """Appends episodes, and knows those that an earlier, interrupted evaluation left. Without a path, memory alone.

    Args:
        overwrite: forget what the file holds.

    Attributes:
        episodes: by environment, task and sample; the last one where an episode was played again.

    Raises:
        ConfigError: the file is of another evaluation, is none, is being written, or cannot be.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self.path = path
        self.episodes: dict[tuple[str, str, int], EvalEpisode] = {}
        self._file: TextIO | None = None
        if path is None:
            return
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", encoding="utf-8")
        try:
            _lock(self._file, path)
            if overwrite:
                self._file.truncate(0)
            self._take_up(self._file, path, settings)
        except BaseException:
            self._file.close()
            raise

    def add(self, episode: EvalEpisode) -> None:
        """Keep an episode. When this returns, no kill of this process loses it."""
        self.episodes[episode.env, episode.task_id, episode.sample] = episode
        self._write(vars(episode))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _take_up(self, file: TextIO, path: Path, settings: Mapping[str, Any]) -> None:
        file.seek(0)
        try:
            text = file.read()
            if not text.startswith(_BEGINNING[: len(text)]):
                raise ValueError(f"it begins with {text[: len(_BEGINNING)]!r}")
            whole = text[: text.rfind("\n") + 1]  # a killed process may leave half a line
            rows = [json.loads(line) for line in whole.splitlines()]
            before = rows[0]["evaluation"] if rows else None
            episodes = [EvalEpisode(**row) for row in rows[1:]]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--out: {path} holds something else than an evaluation: {error!r}; choose another file, or add "
                "--overwrite"
            ) from error
        file.truncate(len(whole.encode()))
        if before is None:
            self._write({"evaluation": settings})
            return
        if changed := _changes(before, json.loads(json.dumps(settings))):
            raise ConfigError(
                f"--out: {path} holds an evaluation with {changed}; choose another file, or add --overwrite"
            )
        self.episodes = {(e.env, e.task_id, e.sample): e for e in episodes}

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()


def _lock(file: TextIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(f"--out: another evaluation is writing {path}") from error


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    keys = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    return ", ".join(f"{key}={before.get(key)!r}, not {now.get(key)!r}" for key in keys)
