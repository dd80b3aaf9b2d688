"""The environments of a run and their tasks: one, or a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparring.agents.policy import Policy
from sparring.agents.runner import make_env, make_runner
from sparring.config import EnvPart, RunConfig
from sparring.errors import TaskError
from sparring.types import ChatClient, EpisodeResult, EpisodeSpec, RunEpisode

if TYPE_CHECKING:
    from sparring.backend.rollout.sampler import Sampler

__all__ = ["TaskSource", "make_episode_runner", "make_sampler", "open_sources"]


@dataclass(frozen=True)
class TaskSource:
    """One environment's tasks. `name` stands for the environment in specs, buffer and metrics.

    Attributes:
        tools: it has some before a task begins.
    """

    name: str
    part: EnvPart
    train: Sequence[str]
    held_out: Sequence[str]
    tools: bool


def open_sources(config: RunConfig) -> tuple[TaskSource, ...]:
    """
    Raises:
        ConfigError: an environment that cannot be made.
        TaskError: a split that cannot be read, or is empty.
    """
    return tuple(_open(part, config) for part in config.env.parts)


def make_sampler(sources: Sequence[TaskSource], config: RunConfig) -> Sampler:
    from sparring.backend.rollout import Curriculum, MixtureSampler, TaskSampler

    samplers = [
        TaskSampler(source.name, source.train, group_size=config.rollout.group_size, seed=config.seed)
        for source in sources
    ]
    weights = [source.part.weight for source in sources]
    sampler = samplers[0] if len(samplers) == 1 else MixtureSampler(list(zip(samplers, weights, strict=True)))
    return Curriculum(sampler) if config.rollout.curriculum else sampler


def make_episode_runner(sources: Sequence[TaskSource], policy: Policy, config: RunConfig) -> RunEpisode:
    """Plays an episode in the environment that its spec names."""
    runners = {
        source.name: make_runner(
            source.part.id,
            source.part.kwargs,
            policy,
            max_turns=config.rollout.max_turns,
            timeout_s=config.rollout.episode_timeout_s,
        )
        for source in sources
    }

    async def run_episode(spec: EpisodeSpec, client: ChatClient) -> EpisodeResult:
        return await runners[spec.env_id](spec, client)

    return run_episode


def _open(part: EnvPart, config: RunConfig) -> TaskSource:
    env = make_env(part.id, part.kwargs)
    try:
        train, held_out = env.task_ids("train"), env.task_ids(config.eval.split)
    finally:
        env.close()
    if not held_out:
        raise TaskError(f"eval.split={config.eval.split!r} of {part.id} has no tasks to evaluate on")
    chosen = [held_out[i] for i in range(min(len(held_out), config.eval.tasks))]
    return TaskSource(part.label if config.env.mixture else part.id, part, train, chosen, bool(env.tools))
