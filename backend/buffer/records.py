"""What the buffer holds, as frozen dataclasses: group specs, stored trajectories, and the rows that viewers list."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparring.types import EpisodeSpec, Trajectory

__all__ = [
    "EpisodeRow",
    "GroupSpec",
    "LedgerRow",
    "StoredGroup",
    "StoredTrajectory",
    "decode_logprobs",
    "encode_logprobs",
]


@dataclass(frozen=True)
class GroupSpec:
    """One task under one environment seed, to be played `size` times.

    Attributes:
        seq: the group's number in the order in which groups were drawn, from 0; the sampler's position.
    """

    seq: int
    group_id: str
    env_id: str
    task_id: str
    seed: int
    size: int
    split: str = "train"

    def episode(self, member: int, attempt: int = 0) -> EpisodeSpec:
        """What member `member` plays. Ids repeat after a restart, so that a member can be stored only once."""
        return EpisodeSpec(
            episode_id=f"{self.group_id}.{member:02}.{attempt}",
            group_id=self.group_id,
            env_id=self.env_id,
            task_id=self.task_id,
            seed=self.seed,
            split=self.split,
            attempt=attempt,
        )


@dataclass(frozen=True)
class StoredTrajectory:
    """A trajectory and where its weights lie in the run's history.

    Attributes:
        branch_step: where the run was resumed since the trajectory was sampled, the step that sampling and training
            last had in common (see `rollout.selection.lag`); None where it was sampled since the last resume.
    """

    trajectory: Trajectory
    branch_step: int | None = None


@dataclass(frozen=True)
class StoredGroup:
    """A group and those of its trajectories that are neither dropped nor expired; failed attempts included."""

    spec: GroupSpec
    members: tuple[StoredTrajectory, ...] = ()

    @property
    def survivors(self) -> tuple[StoredTrajectory, ...]:
        return tuple(m for m in self.members if not m.trajectory.failed)

    def missing(self, attempts: int) -> Iterator[tuple[int, int]]:
        """(member, next attempt) of every member that has neither succeeded nor failed `attempts` times."""
        failed = {m.trajectory.episode_id: m.trajectory.failed for m in self.members}
        for member in range(self.spec.size):
            for attempt in range(attempts):
                episode_id = self.spec.episode(member, attempt).episode_id
                if episode_id not in failed:
                    yield member, attempt
                    break
                if not failed[episode_id]:
                    break


@dataclass(frozen=True)
class LedgerRow:
    """The fate of one stored trajectory. `consumed_step` is None unless `state` is "consumed"."""

    episode_id: str
    group_id: str
    state: str
    consumed_step: int | None
    incarnation: int


@dataclass(frozen=True)
class EpisodeRow:
    """One line of a viewer's list: everything of a trajectory but its tokens and messages.

    `pruned`: those are forgotten, and `BufferView.trajectory` has nothing to give.
    """

    episode_id: str
    group_id: str
    env_id: str
    task_id: str
    split: str
    attempt: int
    state: str
    consumed_step: int | None
    incarnation: int
    reward: float | None
    stop_reason: str
    failure_kind: str | None
    oldest_version: int | None
    action_tokens: int
    turns: int
    started_at: float
    finished_at: float
    pruned: bool = False


def encode_logprobs(arrays: Sequence[NDArray[np.float32]]) -> bytes:
    """The stored form of one array a sequence: their number and lengths, then what they hold, all little-endian."""
    lengths = np.array([len(arrays), *map(len, arrays)], "<u4")
    return zlib.compress(b"".join([lengths.tobytes(), *(array.astype("<f4").tobytes() for array in arrays)]), level=1)


def decode_logprobs(data: bytes) -> list[NDArray[np.float32]]:
    """Inverse of `encode_logprobs`.

    Raises:
        ValueError: the bytes are damaged.
    """
    try:
        whole = zlib.decompress(data)
    except zlib.error as error:
        raise ValueError(f"stored log-probabilities are damaged: {error}") from error
    count = int(np.frombuffer(whole, "<u4", 1)[0])
    lengths = np.frombuffer(whole, "<u4", count, offset=4)
    values = np.frombuffer(whole, "<f4", offset=4 * (1 + count)).astype(np.float32)
    return np.split(values, np.cumsum(lengths)[:-1]) if count else []
