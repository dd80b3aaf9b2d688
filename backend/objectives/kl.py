"""Estimators of KL(π ‖ reference) from single samples of π (Schulman, "Approximating KL divergence").

With d = log reference − log π:
    k1 = −d              unbiased; as a loss its expected gradient is zero, so it belongs in the reward
    k2 = d² / 2          biased, low variance; its gradient is that of the KL
    k3 = exp(d) − 1 − d  unbiased, never negative; off-policy it is weighted by ρ = π/μ (DeepSeek-V3.2, 2512.02556)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import Tensor

from sparring.backend.objectives.base import LossInputs
from sparring.errors import ConfigError

__all__ = ["KL_TERMS", "KLTerm", "k2", "k3", "kl_term"]

KLTerm: TypeAlias = "Callable[[LossInputs], Tensor]"


def _log_reference_over_policy(x: LossInputs) -> Tensor:
    if x.reference is None:
        raise ValueError("a KL term needs the reference policy's log-probabilities: LossInputs.reference is None")
    return x.reference - x.logprobs


def k2(x: LossInputs) -> Tensor:
    return _log_reference_over_policy(x).square() / 2


def k3(x: LossInputs) -> Tensor:
    """The ratio carries gradient too, so that the whole is unbiased off-policy; on-policy it is 1."""
    d = _log_reference_over_policy(x)
    return (x.logprobs - x.behaviour).exp() * (d.exp() - 1 - d)


KL_TERMS: Mapping[str, KLTerm] = {"k2": k2, "k3": k3}


def kl_term(name: str) -> KLTerm:
    """
    Raises:
        ConfigError: no such estimator, or one that makes no sense in a loss.
    """
    if name == "k1":
        raise ConfigError(
            "kl=k1 in the loss has no expected gradient; put it in the reward (reward_kl), or use kl=k2 or kl=k3"
        )
    if name not in KL_TERMS:
        raise ConfigError(f"kl={name!r} is unknown: there are k2 and k3, and reward_kl for k1 in the reward")
    return KL_TERMS[name]
