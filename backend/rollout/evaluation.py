"""Held-out episodes: outside admission, stored, and never trained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparring.backend.buffer import GroupSpec
from sparring.backend.rollout.episode import EpisodePlayer
from sparring.backend.rollout.sampler import derive_seed
from sparring.errors import TrainerError
from sparring.types import Trajectory

if TYPE_CHECKING:
    from sparring.backend.engines.base import SamplingParams

__all__ = ["RunningEvaluation", "evaluation_specs", "play_evaluation"]

Progress = Callable[[int, int], None]


def evaluation_specs(
    env_id: str, task_ids: Sequence[str], *, split: str, seed: int, prefix: str, samples: int = 1
) -> list[GroupSpec]:
    """One spec a task. Seeds depend on the run's seed and the task's place alone: evaluations compare in pairs."""
    return [
        GroupSpec(
            seq=index,
            group_id=f"{prefix}.{index:04}",
            env_id=env_id,
            task_id=task_id,
            seed=derive_seed(seed, split, index),
            size=samples,
            split=split,
        )
        for index, task_id in enumerate(task_ids)
    ]


async def play_evaluation(
    player: EpisodePlayer,
    members: Sequence[tuple[GroupSpec, int]],
    *,
    store: Callable[[Trajectory], None],
    sampling: SamplingParams,
    concurrency: int,
    attempts: int,
    on_progress: Progress | None = None,
) -> list[Trajectory]:
    """Play these members of groups; the last attempt of each, in order. `store` is called with every attempt.

    Failed episodes are among the result: the caller counts them.
    """
    limit = asyncio.Semaphore(concurrency)
    finished = 0

    async def play(group: GroupSpec, member: int) -> Trajectory:
        nonlocal finished
        async with limit:
            for attempt in range(attempts):
                trajectory = await player.play(group.episode(member, attempt), evaluation=sampling)
                store(trajectory)
                if not trajectory.failed:
                    break
        finished += 1
        if on_progress is not None:
            on_progress(finished, len(members))
        return trajectory

    async with asyncio.TaskGroup() as tasks:
        played = [tasks.create_task(play(group, member)) for group, member in members]
    return [task.result() for task in played]


@dataclass
class Tally:
    """How many episodes of an evaluation have ended."""

    finished: int = 0

    def count(self, finished: int, total: int) -> None:
        self.finished = finished


@dataclass(frozen=True)
class RunningEvaluation:
    """Held-out episodes that are being played on the worker's loop, all by the weights of one version.

    Whoever started them publishes no other weights before they are done.
    """

    version: int
    tasks: int
    timeout_s: float
    _future: Future[list[Trajectory]]
    _wait: Callable[[Future[list[Trajectory]], float, Callable[[], None]], list[Trajectory]]
    _tally: Tally

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._future.done()

    def result(self, on_wait: Progress = lambda finished, tasks: None) -> list[Trajectory]:
        """Wait for the episodes; failed ones are among them.

        Args:
            on_wait: called every half second until then, in this thread, with how many have ended of how many.

        Raises:
            TrainerError: no end in time, or weights of another version have sampled a token of them.
        """
        try:
            trajectories = self._wait(
                self._future, self.timeout_s, lambda: on_wait(self._tally.finished, self.tasks)
            )
        except TimeoutError as error:
            message = f"the evaluation of {self.tasks} tasks has no end after {self.timeout_s:.0f} s"
            raise TrainerError(message) from error
        for trajectory in trajectories:
            for sequence in trajectory.sequences:
                others = set(sequence.policy_versions[sequence.action_mask].tolist()) - {self.version}
                if others:
                    raise TrainerError(
                        f"the evaluation of version {self.version} has tokens of version {min(others)} "
                        f"({trajectory.episode_id}): weights were published while it ran, so its figures would be "
                        "of no one policy; publish none before it is done"
                    )
        return trajectories
