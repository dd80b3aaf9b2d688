"""From a loss a token to this micro-batch's share of the step's loss, normalised by the whole step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import Tensor

from sparring.backend.objectives.base import LossInputs

__all__ = ["AGGREGATIONS", "Aggregation", "constant", "sequence_mean", "token_mean"]

Aggregation: TypeAlias = "Callable[[LossInputs, Tensor], Tensor]"


def token_mean(x: LossInputs, per_token: Tensor) -> Tensor:
    """Every action token of the step weighs the same (DAPO, 2503.14476)."""
    return per_token.sum() / x.totals.tokens


def sequence_mean(x: LossInputs, per_token: Tensor) -> Tensor:
    """Every sequence weighs the same, its tokens share its weight (GRPO, 2402.03300)."""
    return x.sequence_mean(per_token).sum() / x.totals.sequences


def constant(length: int = 1024) -> Aggregation:
    """Sequences times a fixed length, so that long answers are not discounted (Dr. GRPO, 2503.20783)."""
    return lambda x, per_token: per_token.sum() / (x.totals.sequences * length)


AGGREGATIONS: Mapping[str, Aggregation] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant": constant(),
}
