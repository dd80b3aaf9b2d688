"""Dr. GRPO (2503.20783): GRPO without what biases it towards long wrong answers and easy questions.

    A_k = R_k − mean(R)                                    no division by the deviation
    L   = −(1/(S · length)) Σ_k Σ_i min(ρ_i A_k, clip(ρ_i, 1 − ε_low, 1 + ε_high) A_k)      a constant length
"""

from __future__ import annotations

from typing import Any

from sparring.backend.objectives.base import Objective
from sparring.backend.objectives.compose import Parts, compose
from sparring.backend.objectives.surrogate import clipped

__all__ = ["dr_grpo"]


def dr_grpo(clip_low: float = 0.2, clip_high: float = 0.2, **parts: Any) -> Objective:
    """`length`, a part, is the constant: the token budget of an episode is the usual choice."""
    return compose("dr_grpo", Parts("group_mean", clipped(clip_low, clip_high), aggregation="constant"), parts)
