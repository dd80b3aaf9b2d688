"""Reading a buffer from outside, while its run goes on: what `sparring view` and the ledger tests look at."""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from sparring.backend.buffer.records import EpisodeRow, LedgerRow, decode_logprobs
from sparring.backend.buffer.schema import check_schema, connect, translated_errors
from sparring.errors import BufferStateError
from sparring.types import Failure, Trajectory, decode_trajectory

__all__ = ["BufferView"]

_STORED = [field.name for field in dataclasses.fields(EpisodeRow) if field.name != "pruned"]
_EPISODE_COLUMNS = ", ".join([*_STORED, "length(data) = 0"])
_PROBED = "group_id GLOB 'probe.*'"  # what is stored as an evaluation and is none
_OF_STATE = {"probe": f"state = 'evaluation' AND {_PROBED}", "evaluation": f"state = 'evaluation' AND NOT {_PROBED}"}
_LEDGER_COLUMNS = ", ".join(field.name for field in dataclasses.fields(LedgerRow))


class BufferView:
    """A read-only connection; takes no lease and never holds the writer up. A context manager.

    Raises:
        BufferStateError: the file is missing, damaged, or of another schema.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with translated_errors(path):
            self._connection = connect(path, read_only=True)
            try:
                check_schema(self._connection, path)
            except BaseException:
                self._connection.close()
                raise

    def __enter__(self) -> BufferView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def ledger(self) -> list[LedgerRow]:
        """The fate of every trajectory, in the order in which they were stored."""
        return [LedgerRow(*row) for row in self._query(f"SELECT {_LEDGER_COLUMNS} FROM trajectories ORDER BY id")]

    def group_states(self) -> dict[str, str]:
        """State of every group, in the order in which they were drawn."""
        return {row[0]: row[1] for row in self._query("SELECT group_id, state FROM groups ORDER BY seq")}

    def episodes(
        self,
        *,
        state: str | None = None,
        split: str | None = None,
        task_id: str | None = None,
        group_id: str | None = None,
        consumed_step: int | None = None,
        limit: int = 100,
    ) -> list[EpisodeRow]:
        """The newest episodes that match every filter given, newest first; all of them where `limit` is -1."""
        filters = {
            "state": None if state in _OF_STATE else state,
            "split": split,
            "task_id": task_id,
            "group_id": group_id,
            "consumed_step": consumed_step,
        }
        used = {column: value for column, value in filters.items() if value is not None}
        where = " AND ".join([*(f"{column} = ?" for column in used), _OF_STATE.get(state or "", "1")])
        rows = self._query(
            f"SELECT {_EPISODE_COLUMNS} FROM trajectories WHERE {where} ORDER BY id DESC LIMIT ?",
            (*used.values(), limit),
        )
        return [_episode_row(row) for row in rows]

    def counts(self) -> dict[str, int]:
        """How many episodes are in each state that there is one in."""
        stored = {row[0]: row[1] for row in self._query("SELECT state, count(*) FROM trajectories GROUP BY state")}
        probed = self._query(f"SELECT count(*) FROM trajectories WHERE {_OF_STATE['probe']}")[0][0]
        counts = {**stored, "evaluation": stored.get("evaluation", 0) - probed, "probe": probed}
        return {state: count for state, count in counts.items() if count}

    def episode(self, episode_id: str) -> EpisodeRow:
        """The row of one episode.

        Raises:
            BufferStateError: there is none of that id.
        """
        rows = self._query(f"SELECT {_EPISODE_COLUMNS} FROM trajectories WHERE episode_id = ?", (episode_id,))
        if not rows:
            raise self._no_episode(episode_id)
        return _episode_row(rows[0])

    def trajectory(self, episode_id: str) -> Trajectory:
        """One episode, whole.

        Raises:
            BufferStateError: there is none of that id, it was pruned, or it cannot be read.
        """
        rows = self._query("SELECT data FROM trajectories WHERE episode_id = ?", (episode_id,))
        if not rows:
            raise self._no_episode(episode_id)
        if not rows[0][0]:
            raise BufferStateError(f"episode {episode_id} in {self.path} was pruned: its tokens are forgotten")
        try:
            return decode_trajectory(rows[0][0])
        except (ValueError, KeyError, TypeError) as error:
            raise BufferStateError(f"episode {episode_id} in {self.path} cannot be read: {error}") from error

    def failure(self, row: EpisodeRow) -> Failure | None:
        """What an episode failed of; None where it did not, or is pruned."""
        return None if row.failure_kind is None or row.pruned else self.trajectory(row.episode_id).failure

    def trained_logprobs(self, episode_id: str) -> list[NDArray[np.float32]] | None:
        """What the trainer gave each action token of an episode, by sequence; None where it was not trained.

        Raises:
            BufferStateError: they cannot be read.
        """
        rows = self._query("SELECT data FROM trained_logprobs WHERE episode_id = ?", (episode_id,))
        try:
            return decode_logprobs(rows[0][0]) if rows else None
        except ValueError as error:
            raise BufferStateError(f"episode {episode_id} in {self.path} cannot be read: {error}") from error

    def _no_episode(self, episode_id: str) -> BufferStateError:
        return BufferStateError(f"{self.path} holds no episode {episode_id!r}: `sparring view` lists those it holds")

    def _query(self, sql: str, parameters: tuple[object, ...] = ()) -> list[sqlite3.Row]:
        with translated_errors(self.path):
            return self._connection.execute(sql, parameters).fetchall()


def _episode_row(row: sqlite3.Row) -> EpisodeRow:
    *stored, pruned = row
    values = dict(zip(_STORED, stored, strict=True))
    if values["state"] == "evaluation" and values["group_id"].startswith("probe."):
        values["state"] = "probe"
    return EpisodeRow(**values, pruned=bool(pruned))
