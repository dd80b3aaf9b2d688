"""What goes into a loss and what comes out. An objective is a pure function between the two.

Notation: μ is the behaviour policy, whose log-probability was recorded at sampling; π the policy being trained;
A the advantage; M the loss terms (action tokens) of one micro-batch, S its sequences. An objective sees one micro-batch
at a time but normalises by `Totals`, which count the whole step over all micro-batches and devices, before anything
is rejected: the sum of the micro-batches' losses is the loss of the step, however it was split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sparring.errors import ConfigError
from sparring.types import Group

__all__ = [
    "Advantage",
    "Credits",
    "CriticSpec",
    "Loss",
    "LossInputs",
    "LossOutputs",
    "Metric",
    "Objective",
    "Prepare",
    "Totals",
]

Metric: TypeAlias = "tuple[Tensor, Tensor]"
"""A sum and the count it is over: micro-batches and devices add both, the quotient is what is logged."""

Credits: TypeAlias = "list[list[NDArray[np.float64]]]"
Advantage: TypeAlias = "Callable[[Sequence[Group]], Credits]"
"""For every group and every survivor in it: the advantage of each of its model turns, over its sequences in order."""


@dataclass(frozen=True)
class Totals:
    """Size of the whole step: action tokens, sequences and groups of the episodes that did not fail."""

    tokens: int
    sequences: int
    groups: int


@dataclass(frozen=True, eq=False)
class LossInputs:
    """One micro-batch. All tensors are flat over its M loss terms but for the sizes.

    Attributes:
        logprobs: log π, with gradient.
        behaviour: log μ.
        advantages: A.
        sequence: index 0..n_sequences-1 of the term's sequence; a sequence is never split over micro-batches.
        lags: updates between the weights that sampled the token and the current ones.
        proximal: log-probability under the weights at the start of the step, where the objective asks for it. Without,
            it is log π itself, detached: a step takes one update on its batch.
        reference: log-probability under the reference model, where the objective has a KL term.
        step: numbers that `Objective.prepare` took over the whole step.
        values, old_values, returns: the critic's value of the state before the token, with gradient; the one at the
            start of the step; what it should have been. Where the objective has a critic.
    """

    logprobs: Tensor
    behaviour: Tensor
    advantages: Tensor
    sequence: Tensor
    n_sequences: int
    lags: Tensor
    totals: Totals
    proximal: Tensor | None = None
    reference: Tensor | None = None
    step: Mapping[str, float] = field(default_factory=dict)
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None

    def sequence_sum(self, values: Tensor) -> Tensor:
        """(M,) -> (S,)."""
        return values.new_zeros(self.n_sequences).index_add(0, self.sequence, values)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """(M,) -> (S,), the mean over each sequence's loss terms."""
        return self.sequence_sum(values) / self.sequence_sum(values.new_ones(values.shape))


@dataclass(frozen=True, eq=False)
class LossOutputs:
    """The micro-batch's share of the step's loss, and what is worth logging about it."""

    loss: Tensor
    metrics: Mapping[str, Metric] = field(default_factory=dict)


Loss: TypeAlias = "Callable[[LossInputs], LossOutputs]"
Prepare: TypeAlias = "Callable[[LossInputs], Mapping[str, float]]"


@dataclass(frozen=True)
class CriticSpec:
    """What critic an objective wants.

    Attributes:
        level: "token" or "turn": the steps of generalised advantage estimation.
        discount, trace: γ and λ.
        own_model: a model of its own instead of a layer on the policy's states.
    """

    level: str
    discount: float
    trace: float
    own_model: bool
    learning_rate: float


@dataclass(frozen=True)
class Objective:
    """An advantage and a loss under one name.

    Attributes:
        prepare: looks at the whole step at once, before its loss: `logprobs` and `proximal` are then both the
            log-probabilities under the weights at the start of the step. What it returns is `LossInputs.step`.
        needs_proximal: the trainer computes log-probabilities of the whole step without gradient first.
        needs_reference: the trainer keeps the initial policy and scores every token with it, for the loss.
        reward_kl: subtracted from an episode's reward for each nat of log μ − log reference (k1), summed over it.
            The trainer keeps the initial policy for it, whether the loss needs it or not.
        critic: the trainer keeps a critic, whose advantages replace those of `advantage`.
        parts: what the name expands to, for display.

    Raises:
        ConfigError: these parts do not go together.
    """

    name: str
    advantage: Advantage
    loss: Loss
    prepare: Prepare | None = None
    needs_proximal: bool = False
    needs_reference: bool = False
    reward_kl: float = 0.0
    critic: CriticSpec | None = None
    parts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.prepare is not None and not self.needs_proximal:
            raise ConfigError(f"objective {self.name}: prepare is given log-probabilities: set needs_proximal=True too")
        if self.prepare is not None and self.critic is not None:
            raise ConfigError(
                f"objective {self.name}: prepare runs before a critic's advantages are there: use one of the two"
            )
