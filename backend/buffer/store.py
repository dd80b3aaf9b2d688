"""The buffer's one writer: every accepted trajectory is durable, and every one has exactly one fate."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparring.backend.buffer.lease import RunLease
from sparring.backend.buffer.records import GroupSpec, StoredGroup, StoredTrajectory, encode_logprobs
from sparring.backend.buffer.schema import check_schema, check_soundness, connect, create_tables, translated_errors
from sparring.errors import BufferStateError
from sparring.types import Trajectory, decode_trajectory, encode_trajectory

__all__ = ["TrajectoryBuffer"]

_PRUNED_AT_ONCE = 256
_DONE_WITH = """
SELECT t.id FROM trajectories AS t LEFT JOIN groups AS g ON g.group_id = t.group_id
WHERE length(t.data) > 0 AND (
    (g.state = 'consumed' AND g.consumed_step <= :step)
    OR ((g.state IN ('dropped', 'expired') OR t.state = 'evaluation') AND t.oldest_version < :step)
)
"""


class TrajectoryBuffer:
    """A run's trajectories and groups in one SQLite file; states and transitions are drawn in `buffer/schema.py`.

    Open it with `open`, then say with `begin` which checkpoint the run goes on from. Safe to call from any thread;
    one process at a time, which a lease beside the file holds. Every method raises `BufferStateError` where the disk
    is full, the file is damaged, or a transition is not one of those drawn.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, lease: RunLease) -> None:
        self.path = path
        self._connection = connection
        self._lease = lease
        self._lock = threading.RLock()
        self._incarnation = 0
        self._closed = False

    @classmethod
    def open(cls, path: Path) -> TrajectoryBuffer:
        """Open or create the buffer at `path`, and check that it is sound.

        Raises:
            BufferStateError: another process uses it, it is damaged, or of another schema.
        """
        lease = RunLease(path.with_name(path.name + ".lock"))
        try:
            with translated_errors(path):
                connection = connect(path, read_only=False)
                if not connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone():
                    create_tables(connection)
                check_schema(connection, path)
                check_soundness(connection, path)
        except BaseException:
            lease.release()
            raise
        return cls(path, connection, lease)

    def close(self) -> None:
        """Idempotent. What was stored stays."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._connection.close()
                self._lease.release()

    def begin(self, step: int) -> int:
        """Start a new incarnation of the run at checkpoint `step`; gives its number, from 1.

        Groups and trajectories that later steps consumed are ready and pending again: the checkpoint has not seen
        them. One transaction, so that a kill leaves either history whole.

        Raises:
            BufferStateError: the checkpoint is ahead of the buffer, so the two are not of one run; or so far behind
                that the tokens to train again were pruned.
        """
        with self._transaction() as connection:
            last_step = self._last_step(connection)
            if step > last_step:
                raise BufferStateError(
                    f"the checkpoint is at step {step}, but {self.path} knows steps up to {last_step}: they are not "
                    "of one run; put the right buffer beside the checkpoint, or start a new run from that model"
                )
            if (pruned := self._pruned_after(connection, step)) is not None:
                raise BufferStateError(
                    f"the checkpoint is at step {step}, but {self.path} keeps the tokens of what later steps trained "
                    f"no more, up to step {pruned} (rollout.keep_steps): resume from a checkpoint of step {pruned} or "
                    "later, or start a new run from that model"
                )
            for table, state in (("groups", "ready"), ("trajectories", "pending")):
                connection.execute(
                    f"UPDATE {table} SET state = ?, consumed_step = NULL WHERE consumed_step > ?", (state, step)
                )
            cursor = connection.execute(
                "INSERT INTO incarnations (resumed_step, started_at) VALUES (?, ?)", (step, time.time())
            )
            self._incarnation = int(cursor.lastrowid or 0)
        return self._incarnation

    @property
    def incarnation(self) -> int:
        """Number of the incarnation that `begin` started; 0 before."""
        return self._incarnation

    @property
    def next_seq(self) -> int:
        """The sampler's position: the number of the first group that was never drawn."""
        with self._reading() as connection:
            return int(connection.execute("SELECT COALESCE(MAX(seq) + 1, 0) FROM groups").fetchone()[0])

    def start_group(self, spec: GroupSpec) -> None:
        """Write a group down before its first token, so that a restart plays the same task with the same seed."""
        with self._transaction() as connection:
            connection.execute(
                "INSERT INTO groups (seq, group_id, env_id, task_id, seed, size, split, state) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, 'running')",
                (spec.seq, spec.group_id, spec.env_id, spec.task_id, spec.seed, spec.size, spec.split),
            )

    def store(self, trajectory: Trajectory, *, evaluation: bool = False) -> None:
        """Store one finished episode. When this returns, `kill -9` cannot lose it.

        Raises:
            BufferStateError: an episode of that id is stored already; nothing changes then.
        """
        state = "evaluation" if evaluation else "failed" if trajectory.failed else "pending"
        row = (
            trajectory.episode_id, trajectory.group_id, trajectory.env_id, trajectory.task_id, trajectory.split,
            trajectory.attempt, state, self._incarnation, trajectory.reward, trajectory.stop_reason.value,
            trajectory.failure.kind if trajectory.failure else None, trajectory.oldest_version,
            trajectory.action_tokens, trajectory.usage.turns, trajectory.started_at, trajectory.finished_at,
            encode_trajectory(trajectory),
        )  # fmt: skip
        with self._transaction() as connection:
            try:
                connection.execute(
                    "INSERT INTO trajectories (episode_id, group_id, env_id, task_id, split, attempt, state, "
                    "incarnation, reward, stop_reason, failure_kind, oldest_version, action_tokens, turns, "
                    f"started_at, finished_at, data) VALUES ({', '.join('?' * len(row))})",
                    row,
                )
            except sqlite3.IntegrityError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_CONSTRAINT_UNIQUE:
                    raise
                raise BufferStateError(
                    f"episode {trajectory.episode_id} is stored already: it was played twice, and counts once; "
                    "this is a fault of whoever played it, and the run stops rather than train it twice"
                ) from error

    def accept_group(self, group_id: str) -> None:
        """running → ready: all members are in, and they carry signal."""
        with self._transaction() as connection:
            self._move_group(connection, group_id, "running", "ready")

    def drop_group(self, group_id: str, reason: str) -> None:
        """running → dropped, with its pending trajectories."""
        with self._transaction() as connection:
            self._move_group(connection, group_id, "running", "dropped", reason=reason)
            self._drop_pending(connection, group_id)

    def expire(self, episode_ids: Sequence[str], group_ids: Sequence[str] = ()) -> None:
        """pending → expired for trajectories over the staleness bound.

        `group_ids` are ready groups that it leaves with too little: they expire, and what is left of them is dropped.
        """
        with self._transaction() as connection:
            for episode_id in episode_ids:
                self._move_trajectory(connection, episode_id, "expired")
            for group_id in group_ids:
                self._move_group(connection, group_id, "ready", "expired", reason="staleness")
                self._drop_pending(connection, group_id)

    def consume(self, step: int, batch: Mapping[str, Sequence[str]]) -> None:
        """Mark the batch of one step as consumed: `batch` maps group ids to the episode ids trained of each.

        One transaction, written through to the disk: after a power cut too, no trajectory is trained twice.

        Raises:
            BufferStateError: the step has its batch already, or a group or trajectory is not there to be consumed;
                nothing changes then.
        """
        with self._reading() as writer:
            writer.execute("PRAGMA synchronous=FULL")
            try:
                with self._transaction() as connection:
                    if step <= (last_step := self._last_step(connection)):
                        raise BufferStateError(f"step {step} cannot take a batch: step {last_step} has taken one")
                    for group_id, episode_ids in batch.items():
                        self._move_group(connection, group_id, "ready", "consumed", step=step)
                        for episode_id in episode_ids:
                            self._move_trajectory(connection, episode_id, "consumed", step)
            finally:
                writer.execute("PRAGMA synchronous=NORMAL")

    def keep_trained_logprobs(self, step: int, logprobs: Mapping[str, Sequence[NDArray[np.float32]]]) -> None:
        """Keep what the trainer gave each action token before step `step` changed the weights, for viewers.

        Args:
            logprobs: by episode id, an array for each of its sequences, NaN where a token is no action.
        """
        rows = [(episode_id, step, encode_logprobs(arrays)) for episode_id, arrays in logprobs.items()]
        with self._transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO trained_logprobs VALUES (?, ?, ?)", rows)

    def prune(self, step: int) -> int:
        """Forget tokens and messages of the episodes that steps up to `step` trained, and of those that were sampled
        before it and came to nothing: dropped, expired, failed or held out. Everything else of them stays: the ledger,
        rewards, counts. The space serves later episodes; the file does not shrink.

        A run cannot resume from a checkpoint before `step` afterwards; `begin` refuses it.

        Returns:
            How many episodes were pruned.
        """
        with self._reading() as connection:
            ids = [row[0] for row in connection.execute(_DONE_WITH, {"step": step})]
            named = [row[1] for row in connection.execute("PRAGMA table_info(trajectories)") if row[1] != "data"]
        columns = ", ".join(named)
        for start in range(0, len(ids), _PRUNED_AT_ONCE):  # in short transactions: episodes that end wait for them
            chunk = ids[start : start + _PRUNED_AT_ONCE]
            chosen = f"id IN ({', '.join('?' * len(chunk))})"
            with self._transaction() as connection:
                connection.execute(
                    "DELETE FROM trained_logprobs WHERE episode_id IN "
                    f"(SELECT episode_id FROM trajectories WHERE {chosen})",
                    chunk,
                )
                # Out and in again: SQLite merges pages where rows leave, and not where they shrink.
                rows = connection.execute(f"SELECT {columns} FROM trajectories WHERE {chosen}", chunk).fetchall()
                connection.execute(f"DELETE FROM trajectories WHERE {chosen}", chunk)
                places = ", ".join("?" * len(named))
                connection.executemany(f"INSERT INTO trajectories ({columns}, data) VALUES ({places}, x'')", rows)
        return len(ids)

    def ready_groups(self) -> list[StoredGroup]:
        """Groups that wait to be trained, in the order in which they were drawn."""
        return self._load_groups("ready")

    def interrupted_groups(self) -> list[StoredGroup]:
        """Groups that an earlier incarnation left in flight, with the members that it finished. Call after `begin`."""
        return self._load_groups("running")

    def group_rewards(self) -> list[tuple[GroupSpec, list[float]]]:
        """Every group that ended, whatever became of it, in the order of drawing, with its members' rewards."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT g.seq, g.group_id, g.env_id, g.task_id, g.seed, g.size, g.split, t.reward FROM groups AS g "
                "JOIN trajectories AS t USING (group_id) WHERE g.state != 'running' AND t.reward IS NOT NULL "
                "ORDER BY g.seq"
            ).fetchall()
        rewards: dict[GroupSpec, list[float]] = {}
        for *spec, reward in rows:
            rewards.setdefault(GroupSpec(*spec), []).append(reward)
        return list(rewards.items())

    def _load_groups(self, state: str) -> list[StoredGroup]:
        with self._reading() as connection:
            specs = connection.execute(
                "SELECT seq, group_id, env_id, task_id, seed, size, split FROM groups WHERE state = ? ORDER BY seq",
                (state,),
            ).fetchall()
            groups = [
                (
                    GroupSpec(*spec),
                    connection.execute(
                        "SELECT episode_id, data, (SELECT MIN(resumed_step) FROM incarnations AS later "
                        "WHERE later.incarnation > trajectories.incarnation) FROM trajectories "
                        "WHERE group_id = ? AND state IN ('pending', 'failed') ORDER BY id",
                        (spec[1],),
                    ).fetchall(),
                )
                for spec in specs
            ]
        return [StoredGroup(spec, tuple(self._decode(rows))) for spec, rows in groups]

    def _decode(self, rows: Iterable[tuple[str, bytes, int | None]]) -> Iterator[StoredTrajectory]:
        for episode_id, data, branch_step in rows:
            try:
                yield StoredTrajectory(decode_trajectory(data), branch_step)
            except (ValueError, KeyError, TypeError) as error:
                raise BufferStateError(
                    f"episode {episode_id} in {self.path} cannot be read: {error}; restore the file, "
                    "or resume with the version of sparring that wrote it"
                ) from error

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, translated_errors(self.path):
            if self._closed:
                raise BufferStateError(f"the buffer {self.path} is closed: open it again to go on")
            yield self._connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._reading() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:  # SQLite has rolled back by itself after some errors, a full disk's too
                    connection.execute("ROLLBACK")

    @staticmethod
    def _pruned_after(connection: sqlite3.Connection, step: int) -> int | None:
        """The last step after `step` whose episodes were pruned."""
        row = connection.execute(
            "SELECT MAX(consumed_step) FROM trajectories WHERE consumed_step > ? AND length(data) = 0", (step,)
        ).fetchone()
        return None if row[0] is None else int(row[0])

    @staticmethod
    def _last_step(connection: sqlite3.Connection) -> int:
        row = connection.execute("SELECT COALESCE(MAX(consumed_step), 0) FROM groups").fetchone()
        return int(row[0])

    @staticmethod
    def _drop_pending(connection: sqlite3.Connection, group_id: str) -> None:
        connection.execute(
            "UPDATE trajectories SET state = 'dropped' WHERE group_id = ? AND state = 'pending'", (group_id,)
        )

    def _move_group(
        self,
        connection: sqlite3.Connection,
        group_id: str,
        source: str,
        target: str,
        *,
        step: int | None = None,
        reason: str | None = None,
    ) -> None:
        cursor = connection.execute(
            "UPDATE groups SET state = ?, consumed_step = ?, reason = ? WHERE group_id = ? AND state = ?",
            (target, step, reason, group_id, source),
        )
        if cursor.rowcount != 1:
            raise BufferStateError(f"group {group_id} is not {source} in {self.path}, so it cannot become {target}")

    def _move_trajectory(
        self, connection: sqlite3.Connection, episode_id: str, target: str, step: int | None = None
    ) -> None:
        cursor = connection.execute(
            "UPDATE trajectories SET state = ?, consumed_step = ? WHERE episode_id = ? AND state = 'pending'",
            (target, step, episode_id),
        )
        if cursor.rowcount != 1:
            raise BufferStateError(
                f"trajectory {episode_id} is not pending in {self.path}, so it cannot become {target}: "
                "a trajectory has one fate, and is trained at most once"
            )
