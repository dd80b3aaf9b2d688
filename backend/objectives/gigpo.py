"""GiGPO (2505.10978): credit by group in group: episodes of a task, and within them turns from the same state.

    A = A_E + ω A_S
    A_E = (R_k − mean(R)) / std(R)                         over the group's episodes
    A_S = (G_t − mean(G)) / std(G)                         over the turns of the group with the same anchor
    G_t = Σ_{j ≥ t} γ^{j−t} r_j                            r_j the reward of turn j

`Turn.anchor` keys the state before a turn. A turn without anchor, or alone with its own, gets A_S = 0. An episode
without turn rewards earns its reward at the last turn. L is GRPO's with a token-level mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparring.backend.objectives.advantages import Rewards, group_norm, normalise, per_turn_rewards
from sparring.backend.objectives.base import Advantage, Credits, Objective
from sparring.backend.objectives.compose import Parts, compose
from sparring.backend.objectives.surrogate import clipped
from sparring.types import Group

__all__ = ["discounted_returns", "gigpo", "gigpo_advantage"]


def gigpo(
    step_weight: float = 1.0,
    discount: float = 0.95,
    use_std: bool = True,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    **parts: Any,
) -> Objective:
    """`step_weight` is ω, `discount` is γ; `use_std=False` leaves both deviations out, the paper's other variant."""
    advantage = gigpo_advantage(step_weight, discount, use_std)
    return compose("gigpo", Parts(advantage, clipped(clip_low, clip_high)), parts)


def discounted_returns(rewards: Rewards, discount: float) -> Rewards:
    """G_t = r_t + γ G_{t+1}."""
    returns = np.zeros(len(rewards))
    following = 0.0
    for t in reversed(range(len(rewards))):
        returns[t] = following = rewards[t] + discount * following
    return returns


def gigpo_advantage(step_weight: float, discount: float, use_std: bool) -> Advantage:
    def gigpo_credit(groups: Sequence[Group]) -> Credits:
        by_episode = group_norm(groups, use_std=use_std)
        return [
            [e + step_weight * s for e, s in zip(of_episode, _by_anchor(group, discount, use_std), strict=True)]
            for group, of_episode in zip(groups, by_episode, strict=True)
        ]

    return gigpo_credit


def _by_anchor(group: Group, discount: float, use_std: bool) -> list[Rewards]:
    returns = [discounted_returns(per_turn_rewards(t), discount) for t in group.survivors]
    members: dict[str, list[tuple[int, int]]] = {}
    for k, trajectory in enumerate(group.survivors):
        for t, turn in enumerate(turn for s in trajectory.sequences for turn in s.turns):
            if turn.anchor is not None:
                members.setdefault(turn.anchor, []).append((k, t))
    credits = [np.zeros(len(r)) for r in returns]
    for same_state in members.values():
        values = normalise(np.array([returns[k][t] for k, t in same_state]), use_std=use_std)
        for (k, t), value in zip(same_state, values, strict=True):
            credits[k][t] = value
    return credits
