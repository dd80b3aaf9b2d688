"""A new algorithm in one file: learn from successes alone, the rarer the better (an advantage-weighted imitation).

    A_k = 1 − mean(R) where the episode's reward is above its group's mean, else 0
    L   = −(1/N) Σ_i min(ρ_i, cap) A_k log π_i

Use it by its name:  objective: {name: examples/algorithms/success_only.py:success_only, kwargs: {cap: 2.0}}
"""

import numpy as np
import torch

from sparring.backend.objectives import LossInputs, LossOutputs, Objective


def success_only(cap: float = 2.0) -> Objective:
    return Objective("success_only", advantage, lambda x: loss(x, cap))


def advantage(groups):
    """For each group and each episode that did not fail: one number for each of its model turns."""
    credits = []
    for group in groups:
        rewards = np.array([t.reward for t in group.survivors])
        values = np.where(rewards > rewards.mean(), 1.0 - rewards.mean(), 0.0)
        turns = [sum(len(s.turns) for s in t.sequences) for t in group.survivors]
        credits.append([np.full(n, value) for n, value in zip(turns, values, strict=True)])
    return credits


def loss(x: LossInputs, cap: float) -> LossOutputs:
    weight = (x.logprobs - x.behaviour).detach().exp().clamp(max=cap)
    imitated = x.advantages > 0
    total = -(weight * x.advantages * x.logprobs).sum() / x.totals.tokens
    return LossOutputs(total, {"imitated": (imitated.sum(), torch.ones_like(weight).sum())})
