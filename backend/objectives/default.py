"""The default objective: truncated importance weights, with tokens and sequences kept out that would push too far.

    keep_i = not (A > 0 and π − μ > δ_p) and not (A < 0 and π − μ < −δ_p)      a difference of probabilities
    drop   = A < 0 and mean over the sequence of (log μ − log π) > δ           the whole sequence (2512.02556, §3.1)
    L      = −(1/N) Σ keep_i · sg(min(ρ_i, c)) · A_i · log π_i

N counts the action tokens of the step. Without the masks, and with one optimizer step a batch, the proximal policy of
decoupled PPO is the current one and this is its gradient with a truncated weight: no second forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparring.backend.objectives.advantages import rloo
from sparring.backend.objectives.base import LossInputs, LossOutputs, Objective

__all__ = ["DefaultLoss", "default"]


@dataclass(frozen=True)
class DefaultLoss:
    """Parameters: `max_shift` is δ_p (1 is off), `max_drift` is δ (inf is off), `ratio_cap` is c."""

    max_shift: float = 0.2
    max_drift: float = 0.2
    ratio_cap: float = 2.0

    def __call__(self, x: LossInputs) -> LossOutputs:
        with torch.no_grad():
            log_ratio = x.logprobs - x.behaviour
            shift = x.logprobs.exp() - x.behaviour.exp()
            negative = x.advantages < 0
            too_far = torch.where(negative, shift < -self.max_shift, (x.advantages > 0) & (shift > self.max_shift))
            dropped = negative & (x.sequence_mean(-log_ratio) > self.max_drift)[x.sequence]
            keep = ~(too_far | dropped)
            weight = log_ratio.exp().clamp(max=self.ratio_cap) * keep
        loss = -(weight * x.advantages * x.logprobs).sum() / x.totals.tokens
        n = torch.ones_like(shift).sum()
        return LossOutputs(
            loss,
            {
                "keep_fraction": (keep.sum(), n),
                "clip_fraction/shift": (too_far.sum(), n),
                "clip_fraction/dropped_sequence": (dropped.sum(), n),
                "clip_fraction/ratio_cap": ((log_ratio.exp() > self.ratio_cap).sum(), n),
            },
        )


def default(**kwargs: float) -> Objective:
    return Objective("default", rloo, DefaultLoss(**kwargs))
