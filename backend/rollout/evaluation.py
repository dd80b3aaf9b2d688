"""Held-out episodes: outside admission, stored, and never trained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sparring.backend.buffer import GroupSpec, TrajectoryBuffer
from sparring.backend.rollout.episode import EpisodePlayer
from sparring.backend.rollout.sampler import derive_seed
from sparring.types import Trajectory

if TYPE_CHECKING:
    from sparring.backend.engines.base import SamplingParams

__all__ = ["evaluation_specs", "play_evaluation"]

Progress = Callable[[int, int], None]


def evaluation_specs(env_id: str, task_ids: Sequence[str], *, split: str, seed: int, prefix: str) -> list[GroupSpec]:
    """One spec a task. Seeds depend on the run's seed and the task's place alone: evaluations compare in pairs."""
    return [
        GroupSpec(
            seq=index,
            group_id=f"{prefix}.{index:04}",
            env_id=env_id,
            task_id=task_id,
            seed=derive_seed(seed, split, index),
            size=1,
            split=split,
        )
        for index, task_id in enumerate(task_ids)
    ]


async def play_evaluation(
    player: EpisodePlayer,
    buffer: TrajectoryBuffer,
    specs: Sequence[GroupSpec],
    *,
    sampling: SamplingParams,
    concurrency: int,
    attempts: int,
    on_progress: Progress | None = None,
) -> list[Trajectory]:
    """Play every spec; the last attempt of each, in order. Failed episodes are among them: the caller counts them."""
    limit = asyncio.Semaphore(concurrency)
    finished = 0

    async def play(spec: GroupSpec) -> Trajectory:
        nonlocal finished
        async with limit:
            for attempt in range(attempts):
                trajectory = await player.play(spec.episode(0, attempt), evaluation=sampling)
                buffer.store(trajectory, evaluation=True)
                if not trajectory.failed:
                    break
        finished += 1
        if on_progress is not None:
            on_progress(finished, len(specs))
        return trajectory

    async with asyncio.TaskGroup() as tasks:
        played = [tasks.create_task(play(spec)) for spec in specs]
    return [task.result() for task in played]
