"""Surrogates: a loss for each token, from the log ratio to an older policy and the advantage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from sparring.backend.objectives.base import LossInputs, Metric

__all__ = ["Surrogate", "clip_fractions", "clipped", "policy_gradient"]

Surrogate: TypeAlias = "Callable[[LossInputs, Tensor], tuple[Tensor, Mapping[str, Metric]]]"
"""(inputs, log ratio) -> (loss of each token (M,), metrics)."""


def clipped(low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Surrogate:
    """PPO (1707.06347): −min(ρA, clip(ρ, 1 − low, 1 + high)A); with `dual` at least dual·A where A < 0 (1912.09729)."""

    def surrogate(x: LossInputs, log_ratio: Tensor) -> tuple[Tensor, Mapping[str, Metric]]:
        ratio = log_ratio.exp()
        gain = torch.min(ratio * x.advantages, ratio.clamp(1 - low, 1 + high) * x.advantages)
        if dual is not None:
            gain = torch.where(x.advantages < 0, torch.max(gain, dual * x.advantages), gain)
        return -gain, clip_fractions(x, ratio, low, high)

    return surrogate


def policy_gradient() -> Surrogate:
    """−ρA without any trust region: its gradient is the importance-weighted policy gradient."""
    return lambda x, log_ratio: (-log_ratio.exp() * x.advantages, {})


@torch.no_grad()
def clip_fractions(x: LossInputs, ratio: Tensor, low: float, high: float) -> dict[str, Metric]:
    """Shares of tokens whose gradient the clip takes away, below and above."""
    below = (ratio < 1 - low) & (x.advantages < 0)
    above = (ratio > 1 + high) & (x.advantages > 0)
    n = torch.ones_like(ratio).sum()
    return {
        "clip_fraction/low": (below.sum(), n),
        "clip_fraction/high": (above.sum(), n),
        "keep_fraction": ((~below & ~above).sum(), n),
    }
