"""M2PO (2510.01161): bound the second moment of the log ratio over the batch, leaving out its largest outliers alone.

    T  = tokens where a trust region acts: A > 0 and ρ > 1, or A < 0 and ρ < 1
    take the largest (log ρ)² out of T until its mean over what is left of T is at most τ = 0.04
    L  = −(1/N) Σ_{i kept} ρ_i A                           N counts all tokens; A as in GRPO

The cut is over the whole step, so it is found in a pass of its own before the loss (`prepare`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparring.backend.objectives.base import LossInputs, Metric, Objective
from sparring.backend.objectives.compose import Parts, compose

__all__ = ["m2po", "second_moment_cut"]


def m2po(threshold: float = 0.04, **parts: Any) -> Objective:
    def prepare(x: LossInputs) -> Mapping[str, float]:
        return {"m2po/cut": second_moment_cut(x, threshold)}

    return compose("m2po", Parts("group_norm", _masked), parts, prepare=prepare)


@torch.no_grad()
def second_moment_cut(x: LossInputs, threshold: float) -> float:
    """The largest (log ρ)² that may stay, over the tokens of T in `x`."""
    log_ratio = x.logprobs - x.behaviour
    moments = log_ratio.square()[_trust_region(x, log_ratio)].double().sort().values
    means = moments.cumsum(0) / torch.arange(1, len(moments) + 1, device=moments.device)
    kept = int((means <= threshold).sum())  # the means of a sorted list never fall
    return float(moments[kept - 1]) if kept else 0.0


def _masked(x: LossInputs, log_ratio: Tensor) -> tuple[Tensor, Mapping[str, Metric]]:
    with torch.no_grad():
        # A little slack: the same token scored in another micro-batch may differ in its last bit.
        out = _trust_region(x, log_ratio) & (log_ratio.square() > x.step["m2po/cut"] * (1 + 1e-6))
        n = torch.ones_like(log_ratio).sum()
    return -(log_ratio.exp() * x.advantages) * ~out, {"keep_fraction": ((~out).sum(), n)}


def _trust_region(x: LossInputs, log_ratio: Tensor) -> Tensor:
    return log_ratio.detach() * x.advantages > 0
