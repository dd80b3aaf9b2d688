"""REINFORCE leave-one-out (2402.14740): the other samples of the group are the baseline; no clip.

    A_k = R_k − mean of the others
    L   = −(1/N) Σ_i ρ_i A_k              off-policy tokens are weighted by their ratio
"""

from __future__ import annotations

from typing import Any

from sparring.backend.objectives.base import Objective
from sparring.backend.objectives.compose import Parts, compose
from sparring.backend.objectives.surrogate import policy_gradient

__all__ = ["rloo"]


def rloo(**parts: Any) -> Objective:
    return compose("rloo", Parts("rloo", policy_gradient()), parts)
