"""CISPO (2506.13585): the weight is clipped and carries no gradient, so no token loses its gradient altogether.

    L = −(1/N) Σ_i sg(min(ρ_i, cap)) A log π_i             cap = 1 + ε_high; A as in GRPO
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparring.backend.objectives.base import LossInputs, Metric, Objective
from sparring.backend.objectives.compose import Parts, compose
from sparring.backend.objectives.surrogate import Surrogate

__all__ = ["cispo"]


def cispo(clip_high: float = 4.0, **parts: Any) -> Objective:
    """`clip_high` is ε_high: the cap is 1 + clip_high. (TRL's `epsilon_high` is the cap itself.)"""
    return compose("cispo", Parts("group_norm", _capped(1 + clip_high)), parts)


def _capped(cap: float) -> Surrogate:
    def surrogate(x: LossInputs, log_ratio: Tensor) -> tuple[Tensor, Mapping[str, Metric]]:
        ratio = log_ratio.detach().exp()
        metrics = {"clip_fraction/ratio_cap": ((ratio > cap).sum(), torch.ones_like(ratio).sum())}
        return -ratio.clamp(max=cap) * x.advantages * x.logprobs, metrics

    return surrogate
