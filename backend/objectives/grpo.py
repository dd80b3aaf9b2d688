"""GRPO (2402.03300): advantage in units of the group's deviation, PPO clip, every sequence weighs the same.

    A_k = (R_k − mean(R)) / std(R)                         over the group, population deviation
    L   = −(1/S) Σ_k (1/|o_k|) Σ_i min(ρ_i A_k, clip(ρ_i, 1 − ε_low, 1 + ε_high) A_k)
"""

from __future__ import annotations

from typing import Any

from sparring.backend.objectives.base import Objective
from sparring.backend.objectives.compose import Parts, compose
from sparring.backend.objectives.surrogate import clipped

__all__ = ["grpo"]


def grpo(clip_low: float = 0.2, clip_high: float = 0.2, **parts: Any) -> Objective:
    return compose("grpo", Parts("group_norm", clipped(clip_low, clip_high), aggregation="sequence_mean"), parts)
