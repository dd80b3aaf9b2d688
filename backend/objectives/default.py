"""The default objective: truncated importance weights, with tokens and sequences kept out that would push too far.

    keep_i = not (A > 0 and π − μ > δ_p) and not (A < 0 and π − μ < −δ_p)      a difference of probabilities
    drop   = A < 0 and mean over the sequence of (log μ − log π) > δ           the whole sequence (2512.02556)
    L      = −(1/N) Σ keep_i · sg(min(ρ_i, c)) · A_i · log π_i

N counts the action tokens of the step. Without the masks, and with one optimizer step a batch, the proximal policy of
decoupled PPO is the current one and this is its gradient with a truncated weight: no second forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparring.backend.objectives.base import LossInputs, Metric, Objective
from sparring.backend.objectives.compose import Parts, compose
from sparring.backend.objectives.surrogate import Surrogate

__all__ = ["default"]


def default(max_shift: float = 0.2, max_drift: float = 0.2, ratio_cap: float = 2.0, **parts: Any) -> Objective:
    """`max_shift` is δ_p (1 is off), `max_drift` is δ (inf is off), `ratio_cap` is c."""
    surrogate = masked_truncated(max_shift, max_drift, ratio_cap)
    return compose("default", Parts("rloo", surrogate), parts)


def masked_truncated(max_shift: float, max_drift: float, ratio_cap: float) -> Surrogate:
    def surrogate(x: LossInputs, log_ratio: Tensor) -> tuple[Tensor, Mapping[str, Metric]]:
        with torch.no_grad():
            ratio = log_ratio.exp()
            shift = x.logprobs.exp() - x.behaviour.exp()
            negative = x.advantages < 0
            too_far = torch.where(negative, shift < -max_shift, (x.advantages > 0) & (shift > max_shift))
            drifted = x.sequence_mean(x.behaviour - x.logprobs) > max_drift
            dropped = negative & drifted[x.sequence]
            keep = ~(too_far | dropped)
            weight = ratio.clamp(max=ratio_cap) * keep
            n = torch.ones_like(shift).sum()
        metrics = {
            "keep_fraction": (keep.sum(), n),
            "clip_fraction/shift": (too_far.sum(), n),
            "clip_fraction/dropped_sequence": (dropped.sum(), n),
            "clip_fraction/ratio_cap": ((ratio > ratio_cap).sum(), n),
        }
        return -weight * x.advantages * x.logprobs, metrics

    return surrogate
