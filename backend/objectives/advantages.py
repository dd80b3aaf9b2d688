"""Rewards to advantages: pure functions over the groups of one step, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sparring.backend.objectives.base import Advantage, Credits
from sparring.errors import TrainerError
from sparring.types import Group, StopReason, Trajectory

__all__ = [
    "ADVANTAGES",
    "batch_norm",
    "discount_turns",
    "filter_overlong",
    "group_mean",
    "group_norm",
    "leave_one_out",
    "normalise",
    "per_turn_rewards",
    "rloo",
]

Rewards = NDArray[np.float64]
_OVERLONG = (StopReason.MAX_TOKENS, StopReason.MAX_TURNS)


def leave_one_out(rewards: Rewards) -> Rewards:
    """A_k = R_k − mean of the others (RLOO, 2402.14740). A group of one has nothing to compare with: 0."""
    n = len(rewards)
    return (rewards - rewards.mean()) * (n / (n - 1)) if n > 1 else np.zeros_like(rewards)


def centre(rewards: Rewards) -> Rewards:
    """A_k = R_k − mean(R)."""
    return rewards - rewards.mean()


def normalise(rewards: Rewards, *, use_std: bool = True) -> Rewards:
    """A_k = (R_k − mean(R)) / std(R), population deviation; 0 where all are equal."""
    centred = centre(rewards)
    deviation = rewards.std() if use_std else 1.0
    # Equal rewards have no deviation but that of rounding.
    flat = np.ptp(rewards) <= 1e-12 * max(1.0, float(np.abs(rewards).max()))
    return np.zeros_like(rewards) if flat else centred / deviation


def rloo(groups: Sequence[Group]) -> Credits:
    """Leave-one-out baseline, no division by the standard deviation."""
    return _within_groups(leave_one_out, groups)


def group_mean(groups: Sequence[Group]) -> Credits:
    """The group's mean is the baseline (Dr. GRPO)."""
    return _within_groups(centre, groups)


def group_norm(groups: Sequence[Group], *, use_std: bool = True) -> Credits:
    """In units of the group's deviation (GRPO)."""
    return _within_groups(partial(normalise, use_std=use_std), groups)


def batch_norm(groups: Sequence[Group], *, baseline: bool = False) -> Credits:
    """Normalised over all episodes of the step (REINFORCE++), after the group's mean where `baseline`."""
    rewards = [np.array([_reward(t) for t in g.survivors]) for g in groups]
    if baseline:
        rewards = [centre(r) if len(r) else r for r in rewards]
    flat = normalise(np.concatenate(rewards)) if rewards else np.empty(0)
    values = iter(flat.tolist())
    return [[np.full(_turns(t), next(values)) for t in group.survivors] for group in groups]


def discount_turns(advantage: Advantage, discount: float) -> Advantage:
    """Multiply a turn's advantage by `discount` once for every turn after it: the last ones answer most."""

    def discounted(groups: Sequence[Group]) -> Credits:
        return [[a * discount ** np.arange(len(a))[::-1] for a in group] for group in advantage(groups)]

    return discounted


def filter_overlong(advantage: Advantage) -> Advantage:
    """Give episodes that ran out of turns or tokens no advantage: what they would have done is not known (DAPO).

    They stay in their group's baseline, and their tokens in the normaliser.
    """

    def filtered(groups: Sequence[Group]) -> Credits:
        return [
            [a * (t.stop_reason not in _OVERLONG) for t, a in zip(group.survivors, of_group, strict=True)]
            for group, of_group in zip(groups, advantage(groups), strict=True)
        ]

    return filtered


ADVANTAGES: Mapping[str, Advantage] = {
    "rloo": rloo,
    "group_mean": group_mean,
    "group_norm": group_norm,
    "batch_norm": batch_norm,
    "batch_norm_baseline": partial(batch_norm, baseline=True),
}


def per_turn_rewards(trajectory: Trajectory) -> Rewards:
    """One reward for each model turn; an episode without turn rewards earns all of its reward at the last one.

    Raises:
        TrainerError: rewards and turns differ in number, or a reward is not finite.
    """
    turns = _turns(trajectory)
    if not trajectory.turn_rewards:
        rewards = np.zeros(turns)
        if turns:
            rewards[-1] = _reward(trajectory)
        return rewards
    if len(trajectory.turn_rewards) != turns:
        raise TrainerError(
            f"episode {trajectory.episode_id}: {len(trajectory.turn_rewards)} turn rewards for {turns} model turns; "
            "turn-level credit needs one for each"
        )
    rewards = np.array(trajectory.turn_rewards, np.float64)
    if not np.isfinite(rewards).all():
        raise TrainerError(f"episode {trajectory.episode_id}: its turn rewards are not finite: {rewards.tolist()}")
    return rewards


def _within_groups(compare: Callable[[Rewards], Rewards], groups: Sequence[Group]) -> Credits:
    """Give every turn of an episode the same advantage, computed within the group.

    Where the agents of an episode are rewarded apart (`agent_rewards`), an agent's turns are compared with the same
    agent's in the other members.
    """
    return [
        _by_agent(compare, group.survivors)
        if any(t.agent_rewards for t in group.survivors)
        else _alike(compare, group.survivors)
        for group in groups
    ]


def _alike(compare: Callable[[Rewards], Rewards], members: Sequence[Trajectory]) -> list[Rewards]:
    if not members:
        return []
    advantages = compare(np.array([_reward(t) for t in members]))
    return [np.full(_turns(t), a) for t, a in zip(members, advantages, strict=True)]


def _by_agent(compare: Callable[[Rewards], Rewards], members: Sequence[Trajectory]) -> list[Rewards]:
    speakers = [[turn.agent_id for s in t.sequences for turn in s.turns] for t in members]
    credits = [np.zeros(len(names)) for names in speakers]
    for agent in sorted({name for names in speakers for name in names}):
        present = [k for k, names in enumerate(speakers) if agent in names]
        rewards = np.array([members[k].agent_rewards.get(agent, _reward(members[k])) for k in present])
        if not np.isfinite(rewards).all():
            k = present[int(np.flatnonzero(~np.isfinite(rewards))[0])]
            raise TrainerError(f"episode {members[k].episode_id}: the reward of agent {agent!r} is not finite")
        for k, advantage in zip(present, compare(rewards), strict=True):
            credits[k][[name == agent for name in speakers[k]]] = advantage
    return credits


def _turns(trajectory: Trajectory) -> int:
    return sum(len(s.turns) for s in trajectory.sequences)


def _reward(trajectory: Trajectory) -> float:
    reward = trajectory.reward
    if reward is None or not np.isfinite(reward):
        raise TrainerError(
            f"episode {trajectory.episode_id} ({trajectory.env_id}, {trajectory.task_id}) has reward {reward}: "
            "a reward must be a finite number; an episode without one is a failure"
        )
    return float(reward)
