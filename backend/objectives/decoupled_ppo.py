"""Decoupled PPO (2110.00641; 2505.24298 for language models): clip around a proximal policy, correct to the behaviour.

    L = −(1/N) Σ_i w_i min(r_i A, clip(r_i, 1 − ε, 1 + ε) A)
    r = π / proximal,  w = min(proximal / behaviour, cap)

`proximal: current` takes the policy at the start of the step, which is π itself, detached, since a step is one update:
no second forward, and the gradient of truncated importance sampling. `recompute` computes it, for comparison.
`loglinear` (2512.06547) puts it between the two by the token's lag d:
log proximal = log μ / d + (1 − 1/d) log π for d ≥ 1, and log π where the token is fresh.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparring.backend.objectives.base import LossInputs, LossOutputs, Objective
from sparring.backend.objectives.compose import Parts, compose
from sparring.backend.objectives.surrogate import clipped
from sparring.errors import ConfigError

__all__ = ["decoupled_ppo", "loglinear_proximal"]


def decoupled_ppo(
    clip_low: float = 0.2, clip_high: float = 0.2, cap: float = 2.0, proximal: str = "current", **parts: Any
) -> Objective:
    if proximal not in ("current", "recompute", "loglinear"):
        raise ConfigError(f"objective 'decoupled_ppo': proximal={proximal!r} is not current, recompute or loglinear")
    made = Parts(
        "group_norm",
        clipped(clip_low, clip_high),
        against="proximal",
        corrections=[{"truncated": {"cap": cap}}],
        recompute_proximal=proximal == "recompute",
    )
    objective = compose("decoupled_ppo", made, parts)
    if proximal != "loglinear":
        return objective
    inner = objective.loss

    def loss(x: LossInputs) -> LossOutputs:
        return inner(replace(x, proximal=loglinear_proximal(x)))

    return replace(objective, loss=loss)


@torch.no_grad()
def loglinear_proximal(x: LossInputs) -> Tensor:
    """log-probabilities of the interpolated proximal policy, (M,)."""
    towards_behaviour = torch.where(x.lags > 0, 1.0 / x.lags.clamp(min=1), 0.0).to(x.logprobs.dtype)
    current = x.logprobs.detach()
    return current + towards_behaviour * (x.behaviour - current)
