"""REINFORCE++ (2501.03262): the advantage is normalised over the whole batch, not within the group; PPO clip.

    A_k = (R_k − mean(R)) / std(R)                         over all episodes of the step
    L   = −(1/N) Σ_i min(ρ_i A_k, clip(ρ_i, 1 − ε_low, 1 + ε_high) A_k)

`advantage: batch_norm_baseline` subtracts the group's mean first: the paper's variant with a baseline.
"""

from __future__ import annotations

from typing import Any

from sparring.backend.objectives.base import Objective
from sparring.backend.objectives.compose import Parts, compose
from sparring.backend.objectives.surrogate import clipped

__all__ = ["reinforce_pp"]


def reinforce_pp(clip_low: float = 0.2, clip_high: float = 0.2, **parts: Any) -> Objective:
    return compose("reinforce_pp", Parts("batch_norm", clipped(clip_low, clip_high)), parts)
