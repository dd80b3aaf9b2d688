"""Generalised advantage estimation (1506.02438), over tokens or over turns: what a step is, the caller says."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["gae"]


def gae(
    rewards: NDArray[np.float64], values: NDArray[np.float64], *, discount: float, trace: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A_t = Σ_j (γλ)^j δ_{t+j} with δ_t = r_t + γ V_{t+1} − V_t, and the returns A + V that the critic learns.

    Args:
        rewards, values: (T,); the value after the last step is 0, since the episode is over.
        discount: γ. trace: λ.
    """
    advantages = np.zeros(len(rewards))
    following = next_value = 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + discount * next_value - values[t]
        advantages[t] = following = delta + discount * trace * following
        next_value = values[t]
    return advantages, advantages + values
