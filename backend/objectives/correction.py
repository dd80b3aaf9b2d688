"""Corrections for what lies between the behaviour policy and the proximal one: staleness, and other numerics.

Each maps log(proximal/behaviour), (M,) without gradient, to a weight on the token's loss. They compose by product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from sparring.backend.objectives.base import LossInputs

__all__ = ["CORRECTIONS", "Correction", "icepop", "masked_geometric", "truncated"]

Correction: TypeAlias = "Callable[[LossInputs, Tensor], Tensor]"


def truncated(cap: float = 2.0) -> Correction:
    """min(ρ, cap): truncated importance sampling, biased towards the behaviour policy where ρ is large."""
    return lambda x, log_ratio: log_ratio.exp().clamp(max=cap)


def icepop(low: float = 0.5, high: float = 5.0) -> Correction:
    """ρ where low ≤ ρ ≤ high, else 0: the token is left out (IcePop)."""

    def weight(x: LossInputs, log_ratio: Tensor) -> Tensor:
        ratio = log_ratio.exp()
        return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)

    return weight


def masked_geometric(low: float = 0.99, high: float = 1.01) -> Correction:
    """1 on sequences whose geometric mean of ρ lies in [low, high], else 0: masked importance sampling."""

    def weight(x: LossInputs, log_ratio: Tensor) -> Tensor:
        mean = x.sequence_mean(log_ratio).exp()
        return ((mean >= low) & (mean <= high)).to(log_ratio.dtype)[x.sequence]

    return weight


CORRECTIONS: Mapping[str, Callable[..., Correction]] = {
    "truncated": truncated,
    "icepop": icepop,
    "masked_geometric": masked_geometric,
}
