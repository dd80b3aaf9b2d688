"""The durable trajectory buffer: SQLite in WAL mode, one writer, any number of readers."""

from sparring.backend.buffer.records import EpisodeRow, GroupSpec, LedgerRow, StoredGroup, StoredTrajectory
from sparring.backend.buffer.store import TrajectoryBuffer
from sparring.backend.buffer.view import BufferView

__all__ = [
    "BufferView",
    "EpisodeRow",
    "GroupSpec",
    "LedgerRow",
    "StoredGroup",
    "StoredTrajectory",
    "TrajectoryBuffer",
]
