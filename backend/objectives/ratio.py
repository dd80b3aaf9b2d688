"""Importance ratios: log π against an older policy, by token or by sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import Tensor

from sparring.backend.objectives.base import LossInputs

__all__ = ["RATIOS", "Ratio", "sequence_ratio", "token_ratio"]

Ratio: TypeAlias = "Callable[[LossInputs, Tensor], Tensor]"
"""(inputs, log-probability under the older policy) -> log ratio, (M,), with gradient."""


def token_ratio(x: LossInputs, old: Tensor) -> Tensor:
    return x.logprobs - old


def sequence_ratio(x: LossInputs, old: Tensor) -> Tensor:
    """The geometric mean over each sequence's tokens (GSPO, 2507.18071, equation 7), the same for all of them."""
    return x.sequence_mean(x.logprobs - old)[x.sequence]


RATIOS: Mapping[str, Ratio] = {"token": token_ratio, "sequence": sequence_ratio}
