"""DAPO (2503.14476): clip-higher, every token weighs the same, no reward noise from truncated answers.

    L = −(1/N) Σ_i min(ρ_i A, clip(ρ_i, 1 − 0.2, 1 + 0.28) A)          A as in GRPO
    soft overlong penalty, equation 13, added to the reward of an episode of n sampled tokens:
        0                                    n ≤ max_tokens − buffer
        (max_tokens − buffer − n) / buffer   up to max_tokens
        −1                                   beyond

Dynamic sampling, its third part, is the rollout worker's: groups without signal are dropped and refilled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sparring.backend.objectives.base import Advantage, Credits, Objective
from sparring.backend.objectives.compose import Parts, compose
from sparring.backend.objectives.surrogate import clipped
from sparring.errors import ConfigError
from sparring.types import Group

__all__ = ["dapo", "soft_overlong_penalty"]


def dapo(
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    max_tokens: int | None = None,
    overlong_buffer: int | None = None,
    **parts: Any,
) -> Objective:
    """Without `max_tokens` (and `overlong_buffer`, a fifth of it by default) there is no overlong penalty."""
    objective = compose("dapo", Parts("group_norm", clipped(clip_low, clip_high)), parts)
    if max_tokens is None:
        return objective
    buffer = max_tokens // 5 if overlong_buffer is None else overlong_buffer
    if not 0 < buffer <= max_tokens:
        raise ConfigError(f"objective 'dapo': overlong_buffer={buffer} must lie between 1 and max_tokens={max_tokens}")
    return replace(objective, advantage=_penalised(objective.advantage, max_tokens, buffer))


def soft_overlong_penalty(tokens: int, max_tokens: int, buffer: int) -> float:
    """Equation 13: from 0 down to −1 over the last `buffer` tokens of the length budget."""
    return max(-1.0, min(0.0, (max_tokens - buffer - tokens) / buffer))


def _penalised(advantage: Advantage, max_tokens: int, buffer: int) -> Advantage:
    def penalised(groups: Sequence[Group]) -> Credits:
        return advantage(
            [
                replace(
                    group,
                    trajectories=tuple(
                        replace(t, reward=t.reward + soft_overlong_penalty(t.action_tokens, max_tokens, buffer))
                        for t in group.survivors
                        if t.reward is not None
                    ),
                )
                for group in groups
            ]
        )

    return penalised
