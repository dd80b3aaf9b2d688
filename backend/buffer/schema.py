"""The buffer's tables, how a connection to them is opened, and what SQLite's errors mean to a person.

                 start_group          accept_group          consume
    groups:        ────────►  running ────────────►  ready ─────────►  consumed
                                 │                   │  ▲                  │
                                 │ drop_group        │  └──────────────────┘
                                 ▼            expire ▼     begin(c): consumed by a step after c
                              dropped             expired

    trajectories:  pending ──►  consumed, and back as above; or dropped, or expired, with or without their group
                   failed       infrastructure failures: kept, shown, never trained
                   evaluation   held-out episodes and the probe's, which a view tells apart: never trained

A group that is `running` when the process dies is in flight: the next process plays the members that it lacks.
A trajectory whose `data` is empty was pruned: its tokens and messages are forgotten, and its fate stands.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparring.errors import BufferStateError
from sparring.types import EPISODE_STATES

__all__ = ["BUFFER_SCHEMA", "check_schema", "check_soundness", "connect", "create_tables", "translated_errors"]

BUFFER_SCHEMA = 2
_BUSY_TIMEOUT_S = 10.0
_STORED_STATES = tuple(state for state in EPISODE_STATES if state != "probe")

_TABLES = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE incarnations (
    incarnation INTEGER PRIMARY KEY,
    resumed_step INTEGER NOT NULL,
    started_at REAL NOT NULL
);
CREATE TABLE groups (
    seq INTEGER PRIMARY KEY,
    group_id TEXT NOT NULL UNIQUE,
    env_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    seed INTEGER NOT NULL,
    size INTEGER NOT NULL,
    split TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('running', 'ready', 'consumed', 'dropped', 'expired')),
    reason TEXT,
    consumed_step INTEGER,
    CHECK ((state = 'consumed') = (consumed_step IS NOT NULL))
);
CREATE TABLE trajectories (
    id INTEGER PRIMARY KEY,
    episode_id TEXT NOT NULL UNIQUE,
    group_id TEXT NOT NULL,
    env_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    split TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN {_STORED_STATES}),
    consumed_step INTEGER,
    incarnation INTEGER NOT NULL REFERENCES incarnations,
    reward REAL,
    stop_reason TEXT NOT NULL,
    failure_kind TEXT,
    oldest_version INTEGER,
    action_tokens INTEGER NOT NULL,
    turns INTEGER NOT NULL,
    started_at REAL NOT NULL,
    finished_at REAL NOT NULL,
    data BLOB NOT NULL,
    CHECK ((state = 'consumed') = (consumed_step IS NOT NULL))
);
CREATE TABLE trained_logprobs (
    episode_id TEXT PRIMARY KEY,
    step INTEGER NOT NULL,
    data BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX groups_by_state ON groups (state, consumed_step);
CREATE INDEX trajectories_by_group ON trajectories (group_id);
CREATE INDEX trajectories_by_state ON trajectories (state, consumed_step);
"""


def connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """Open the file. A writer gets WAL, so that readers neither wait for it nor hold it up.

    `synchronous=NORMAL`: a commit is in the operating system's hands when it returns, so `kill -9` of any process
    loses nothing; a power cut may lose the last commits, never the file. The commit that consumes a batch is the one
    that must not be lost even then, and `TrajectoryBuffer.consume` makes it under FULL.
    """
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    # check_same_thread: opened by the main thread, used by the worker's loop; the buffer's own lock keeps order.
    connection = sqlite3.connect(
        uri, uri=True, isolation_level=None, timeout=_BUSY_TIMEOUT_S, check_same_thread=read_only
    )
    if not read_only:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")
    return connection


def create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables in one transaction: a process killed half-way leaves none of them."""
    insert = f"INSERT INTO meta VALUES ('schema', '{BUFFER_SCHEMA}');"
    connection.executescript(f"BEGIN IMMEDIATE; {_TABLES} {insert} COMMIT;")


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Raises BufferStateError where the file is of another version of sparring."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    if row is None or row[0] != str(BUFFER_SCHEMA):
        found = None if row is None else row[0]
        raise BufferStateError(
            f"{path} has buffer schema {found}, this version of sparring reads {BUFFER_SCHEMA}: "
            "resume the run with the version that wrote it, or start it anew in another run_dir"
        )


def check_soundness(connection: sqlite3.Connection, path: Path) -> None:
    """Raises BufferStateError where the file's pages do not hang together. Reads all of it."""
    problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise BufferStateError(f"trajectory buffer {path}: {problem!r}; {_ADVICE[sqlite3.SQLITE_CORRUPT]}")


_ADVICE = {
    sqlite3.SQLITE_FULL: "the disk is full: free some space and resume; everything stored before is safe",
    sqlite3.SQLITE_IOERR: "the disk failed: check it (space, quota, mount) and resume",
    sqlite3.SQLITE_CORRUPT: "the file is damaged: restore it, or move it away and start the run anew",
    sqlite3.SQLITE_NOTADB: "the file is no trajectory buffer, or damaged: restore it, or move it away and start anew",
    sqlite3.SQLITE_BUSY: "another program holds a lock on it: close that program and resume",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: does it exist, may you read it and write beside it?",
    sqlite3.SQLITE_READONLY: "it cannot be written: check its permissions and those of its folder",
}


@contextmanager
def translated_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into `BufferStateError`s that say what to do."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # extended codes keep the primary one in the low byte
        advice = _ADVICE.get(code, "this is a fault of sparring: please report it")
        raise BufferStateError(f"trajectory buffer {path}: {error}; {advice}") from error
