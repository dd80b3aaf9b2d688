"""SAPO (2511.20347): a soft gate in place of the clip, steeper where the advantage is negative.

    f(ρ) = (4/τ) σ(τ (ρ − 1))                              τ = 1 where A > 0, else 1.05
    L    = −(1/S) Σ_k (1/|o_k|) Σ_i f(ρ_i) A_k             A as in GRPO; f'(1) = 1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparring.backend.objectives.base import LossInputs, Metric, Objective
from sparring.backend.objectives.compose import Parts, compose
from sparring.backend.objectives.surrogate import Surrogate

__all__ = ["sapo"]


def sapo(tau_positive: float = 1.0, tau_negative: float = 1.05, **parts: Any) -> Objective:
    gate = _soft_gate(tau_positive, tau_negative)
    return compose("sapo", Parts("group_norm", gate, aggregation="sequence_mean"), parts)


def _soft_gate(tau_positive: float, tau_negative: float) -> Surrogate:
    def surrogate(x: LossInputs, log_ratio: Tensor) -> tuple[Tensor, Mapping[str, Metric]]:
        tau = torch.where(x.advantages > 0, tau_positive, tau_negative)
        gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
        slope = gate.detach() * tau / 4
        return -gate * x.advantages, {"gate/slope": ((4 * slope * (1 - slope)).sum(), torch.ones_like(slope).sum())}

    return surrogate
