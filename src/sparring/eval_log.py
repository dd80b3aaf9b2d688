"""The file of an evaluation: a line that says what is evaluated, then a line an episode, in the order of their ends."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from sparring.errors import ConfigError
from sparring.evaluation import EvalEpisode

__all__ = ["EvalLog"]


class EvalLog:
    """Appends episodes, and knows those that an earlier, interrupted evaluation left. Without a path, memory alone.

    Attributes:
        episodes: by environment, task and sample; the last one where an episode was played again.

    Raises:
        ConfigError: the file is of another evaluation, is none, is being written, or cannot be.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.episodes: dict[tuple[str, str, int], EvalEpisode] = {}
        self._file: TextIO | None = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out: cannot write {path}: {error.strerror}") from error
        try:
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
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"--out: another evaluation is writing {path}") from error
        file.seek(0)
        text = file.read()
        whole = text[: text.rfind("\n") + 1]  # a killed process may leave half a line
        file.truncate(len(whole.encode()))
        if not whole:
            self._write({"evaluation": settings})
            return
        try:
            header, *rows = map(json.loads, whole.splitlines())
            before = header["evaluation"]
            episodes = [EvalEpisode(**row) for row in rows]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--out: {path} holds something else than an evaluation: {error!r}") from error
        if changed := _changes(before, json.loads(json.dumps(settings))):
            raise ConfigError(f"--out: {path} holds an evaluation with {changed}; choose another file, or delete it")
        self.episodes = {(e.env, e.task_id, e.sample): e for e in episodes}

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    keys = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    return ", ".join(f"{key}={before.get(key)!r}, not {now.get(key)!r}" for key in keys)
