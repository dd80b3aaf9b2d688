"""Rewards to advantages: pure functions over the groups of one step, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sparring.backend.objectives.base import Credits
from sparring.errors import TrainerError
from sparring.types import Group, Trajectory

__all__ = ["leave_one_out", "per_episode", "rloo", "turn_rewards_of"]

Rewards = NDArray[np.float64]


def leave_one_out(rewards: Rewards) -> Rewards:
    """A_k = R_k − mean of the others (RLOO, 2402.14740). A group of one has nothing to compare with: 0."""
    n = len(rewards)
    return (rewards - rewards.mean()) * (n / (n - 1)) if n > 1 else np.zeros_like(rewards)


def per_episode(within_group: Callable[[Rewards], Rewards], groups: Sequence[Group]) -> Credits:
    """Give every turn of an episode the same advantage, computed within the group.

    Where the agents of an episode are rewarded apart (`agent_rewards`), an agent's turns are compared with the same
    agent's in the other members.
    """
    credits: Credits = []
    for group in groups:
        members = group.survivors
        rewards = [turn_rewards_of(t) for t in members]
        agents = [[turn.agent_id for s in t.sequences for turn in s.turns] for t in members]
        out = [np.zeros(len(r)) for r in rewards]
        if not any(t.agent_rewards for t in members):
            for values, advantage in zip(out, within_group(np.array([_reward(t) for t in members])), strict=True):
                values[:] = advantage
        else:
            for agent in sorted({a for names in agents for a in names}):
                present = [i for i, names in enumerate(agents) if agent in names]
                advantage = within_group(np.array([rewards[i][agents[i].index(agent)] for i in present]))
                for i, a in zip(present, advantage, strict=True):
                    out[i][[name == agent for name in agents[i]]] = a
        credits.append(out)
    return credits


def turn_rewards_of(trajectory: Trajectory) -> Rewards:
    """The reward that each model turn answers for: its agent's, else the episode's.

    Raises:
        TrainerError: a reward is missing or not finite.
    """
    by_agent = trajectory.agent_rewards
    turns = [turn for s in trajectory.sequences for turn in s.turns]
    whole = _reward(trajectory)
    rewards = np.array([by_agent.get(turn.agent_id, whole) for turn in turns], np.float64)
    if not np.isfinite(rewards).all():
        raise TrainerError(f"episode {trajectory.episode_id}: an agent's reward is not finite: {dict(by_agent)}")
    return rewards


def rloo(groups: Sequence[Group]) -> Credits:
    """Leave-one-out baseline, no division by the standard deviation."""
    return per_episode(leave_one_out, groups)


def _reward(trajectory: Trajectory) -> float:
    reward = trajectory.reward
    if reward is None or not np.isfinite(reward):
        raise TrainerError(
            f"episode {trajectory.episode_id} ({trajectory.env_id}, {trajectory.task_id}) has reward {reward}: "
            "a reward must be a finite number; an episode without one is a failure"
        )
    return float(reward)
