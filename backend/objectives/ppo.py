"""PPO with a critic (1707.06347), generalised advantages (1506.02438) and the dual clip (1912.09729).

    A   from GAE over the critic's values, by token or by turn, normalised over the step
    L_π = −(1/N) Σ_i max(min(ρ_i A, clip(ρ_i, 1 − ε, 1 + ε) A), c A where A < 0)             c = 3
    L_V = (1/N) Σ_i ½ max((V_i − R_i)², (clip(V_i, V_old ± ε_V) − R_i)²),  R = A + V_old, before normalising
    L   = [step > warmup] L_π + L_V
"""

from __future__ import annotations

from typing import Any

import torch

from sparring.backend.objectives.advantages import rloo
from sparring.backend.objectives.base import CriticSpec, LossInputs, LossOutputs, Objective
from sparring.backend.objectives.compose import Parts, compose
from sparring.backend.objectives.surrogate import clipped
from sparring.errors import ConfigError

__all__ = ["ppo", "value_loss"]


def ppo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
    value_clip: float = 0.2,
    level: str = "token",
    discount: float = 1.0,
    trace: float = 0.95,
    critic: str = "head",
    critic_learning_rate: float = 1e-3,
    critic_warmup_steps: int = 0,
    **parts: Any,
) -> Objective:
    """
    Args:
        level: of GAE: "token", or "turn", where all tokens of a turn share its advantage.
        discount, trace: γ and λ, by step of that level.
        critic: "head", one linear layer on the policy's last states, or "model", a copy of the policy with that layer.
        critic_warmup_steps: the critic alone learns for so many steps.
    """
    if level not in ("token", "turn") or critic not in ("head", "model"):
        raise ConfigError(f"objective 'ppo': level={level!r} must be token or turn, critic={critic!r} head or model")
    if "advantage" in parts:
        raise ConfigError("objective 'ppo': its advantage is the critic's; choose another objective instead")
    policy = compose("ppo", Parts(rloo, clipped(clip_low, clip_high, dual_clip)), parts)

    def loss(x: LossInputs) -> LossOutputs:
        of_policy, of_critic = policy.loss(x), value_loss(x, value_clip)
        warming_up = x.step.get("critic/step", 0.0) < critic_warmup_steps
        total = of_critic.loss + (0.0 if warming_up else 1.0) * of_policy.loss
        return LossOutputs(total, {**of_policy.metrics, **of_critic.metrics})

    return Objective(
        "ppo",
        policy.advantage,  # replaced by the critic's, token by token
        loss,
        needs_reference=policy.needs_reference,
        reward_kl=policy.reward_kl,
        critic=CriticSpec(level, discount, trace, critic == "model", critic_learning_rate),
        parts={**policy.parts, "advantage": f"GAE by {level}, γ={discount}, λ={trace}"},
    )


def value_loss(x: LossInputs, clip: float) -> LossOutputs:
    """Half the squared error to the returns, at least that of a value which moved by `clip` at most."""
    if x.values is None or x.old_values is None or x.returns is None:
        raise ValueError("a value loss needs LossInputs.values, old_values and returns")
    near = x.old_values + (x.values - x.old_values).clamp(-clip, clip)
    errors = torch.max((x.values - x.returns).square(), (near - x.returns).square())
    n = torch.ones_like(errors).sum()
    metrics = {
        "critic/loss": (errors.detach().sum() / 2, n),
        "critic/value": (x.values.detach().sum(), n),
        "critic/return": (x.returns.sum(), n),
        "critic/clip_fraction": (((x.values - x.old_values).abs() > clip).sum(), n),
    }
    return LossOutputs(errors.sum() / 2 / x.totals.tokens, metrics)
