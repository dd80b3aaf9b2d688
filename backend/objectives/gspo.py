"""GSPO (2507.18071): the ratio is the sequence's, and so is the clip.

    s_k = exp((1/|o_k|) Σ_i (log π_i − log μ_i))
    L   = −(1/S) Σ_k min(s_k A_k, clip(s_k, 1 − 3e-4, 1 + 4e-4) A_k)       A as in GRPO
"""

from __future__ import annotations

from typing import Any

from sparring.backend.objectives.base import Objective
from sparring.backend.objectives.compose import Parts, compose
from sparring.backend.objectives.surrogate import clipped

__all__ = ["gspo"]


def gspo(clip_low: float = 3e-4, clip_high: float = 4e-4, **parts: Any) -> Objective:
    made = Parts("group_norm", clipped(clip_low, clip_high), ratio="sequence", aggregation="sequence_mean")
    return compose("gspo", made, parts)
