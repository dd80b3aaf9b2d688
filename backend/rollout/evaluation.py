"""Held-out episodes: outside admission, stored, and never trained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sparring.backend.buffer import GroupSpec
from sparring.backend.rollout.episode import EpisodePlayer
from sparring.backend.rollout.sampler import derive_seed
from sparring.types import Trajectory

if TYPE_CHECKING:
    from sparring.backend.engines.base import SamplingParams

__all__ = ["evaluation_specs", "play_evaluation"]

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
