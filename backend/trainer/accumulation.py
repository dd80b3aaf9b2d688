"""A step's gradient, accumulated over its micro-batches: one row a pass, the rows shared between ranks.

transformers' own accumulation has a fixed number of micro-batches. Here it differs by step, and each loss is already a
share of the step's (see `Totals`), so the gradients of all rows, on all ranks, add up to that of the step.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from sparring.backend.objectives.base import LossInputs, Objective
from sparring.backend.trainer.clock import StepClock
from sparring.backend.trainer.critic import Critic
from sparring.backend.trainer.head import Scores
from sparring.backend.trainer.metrics import StepMeter
from sparring.backend.trainer.packing import PackedRow, Sample, pack, split_rows
from sparring.backend.trainer.passes import prepare_step, proximal_of, reference_of, score_rows
from sparring.backend.trainer.ranks import Ranks
from sparring.backend.trainer.step import Scored, Step, logprobs_by_sample, loss_inputs
from sparring.types import Group

__all__ = ["Accumulated", "GradientAccumulation"]


@dataclass(frozen=True, eq=False)
class Accumulated:
    """What the passes of a step found, the same on every rank. The gradient is where backward leaves it.

    Attributes:
        loss: of the step: a scalar on the device.
        step: as it was trained: with the critic's advantages, where there is one.
        metrics: for the step's record.
        scored: what the action tokens of each sample had before the update, by its index in the step.
    """

    loss: Tensor
    step: Step
    metrics: Mapping[str, float]
    scored: Mapping[int, Scored]


@dataclass(frozen=True, eq=False)
class GradientAccumulation:
    """
    Attributes:
        token_budget: of a row.
        reference: the policy that the run started from, where the objective needs it.
    """

    objective: Objective
    accelerator: Accelerator
    ranks: Ranks
    clock: StepClock
    device: torch.device
    token_budget: int
    reference: Any = None
    critic: Critic | None = None

    def accumulate(self, model: Any, step: Step, groups: Sequence[Group]) -> Accumulated:
        """Forward and backward over all rows of the step, after the passes without gradient that its loss needs.

        All ranks call this. Parameters get this rank's gradient times the number of ranks, which their mean undoes.

        Args:
            model: the policy as accelerate wrapped it.
            groups: those that the step was made of, for the critic.

        Raises:
            TrainerError: a sample cannot be packed: see `split_rows`.
        """
        rows = split_rows(step.samples, self.token_budget, at_least=self.ranks.count)
        mine, spare = self.ranks.share(rows)
        known = self._prepare(model, step, groups, mine + spare)
        with self.clock.phase("train"):
            loss, meter, scored = self._backward(model, known, mine, spare)
        loss = self.accelerator.reduce(loss, reduction="sum")
        states = self.ranks.gather(meter.state())
        metrics = {
            "loss": float(loss),
            "tokens/trained": step.totals.tokens,
            "tokens/forwarded": sum(state["counts"]["packing"] for state in states),
            "sequences": step.totals.sequences,
            "groups": step.totals.groups,
            "micro_batches": len(rows),
            **known.numbers,
            **meter.reduce(states),
        }
        return Accumulated(loss, known.step, metrics, ChainMap(*self.ranks.gather(scored)))

    def _prepare(
        self, model: Any, step: Step, groups: Sequence[Group], passes: Sequence[Sequence[Sample]]
    ) -> _Prepared:
        proximal: Mapping[int, Scored] | None = None
        if self.objective.needs_proximal:
            with self.clock.phase("first_pass"):
                scored = score_rows(model, passes, self.device)
            proximal = ChainMap(*self.ranks.gather(scored))
        numbers = prepare_step(self.objective, step, proximal or {})
        if self.critic is None:
            return _Prepared(step, numbers, proximal)
        with self.clock.phase("first_pass"):
            values = self.critic.score(model, passes, self.device)
        credited = self.critic.credit(step, groups, ChainMap(*self.ranks.gather(values)))
        return _Prepared(credited, {**numbers, "critic/step": float(step.version)}, proximal)

    def _backward(
        self, model: Any, known: _Prepared, mine: Sequence[Sequence[Sample]], spare: Sequence[Sequence[Sample]]
    ) -> tuple[Tensor, StepMeter, dict[int, Scored]]:
        """This rank's passes: its share of the loss, of the metrics and of the scores."""
        loss = torch.zeros((), device=self.device, dtype=torch.float64)
        meter = StepMeter()
        scored: dict[int, Scored] = {}
        forwarded = unpacked = 0
        passes = [*mine, *spare]
        for i, members in enumerate(passes):
            counts, last = i < len(mine), i == len(passes) - 1
            # Rows are cut by tokens and masks alone: they stay what they are under the critic's advantages.
            row = pack([known.step.samples[sample.index] for sample in members]).to(self.device)
            # Sharded gradients are averaged in every pass: until the last, they would be whole on every rank.
            with nullcontext() if last else self.accelerator.no_sync(model):
                scores = model(row=row)
                x = self._inputs(row, scores, known)
                out = self.objective.loss(x)
                self.accelerator.backward(out.loss * (self.ranks.count if counts else 0))  # the ranks' mean is taken
            if counts:
                loss += out.loss.detach()
                meter.add(out.metrics)
                meter.observe(x, scores.entropy[row.term_row])
                scored |= logprobs_by_sample(row, scores.logprobs)
                forwarded, unpacked = forwarded + row.tokens, unpacked + row.unpacked_tokens
            del scores, x, out  # before the next row's are there
        meter.add({"packing": (torch.tensor(unpacked), torch.tensor(forwarded))})
        return loss, meter, scored

    def _inputs(self, row: PackedRow, scores: Scores, known: _Prepared) -> LossInputs:
        return loss_inputs(
            row,
            scores,
            known.step.totals,
            proximal=proximal_of(row, known.proximal) if known.proximal is not None else None,
            reference=reference_of(row, self.reference) if self.objective.needs_reference else None,
            step=known.numbers,
            values=self.critic.values(row, scores) if self.critic is not None else None,
            targets=self.critic.targets_of(row) if self.critic is not None else None,
        )


@dataclass(frozen=True, eq=False)
class _Prepared:
    """What is known of the whole step before its gradient: the step with its final advantages, the numbers of
    `Objective.prepare`, and the log-probabilities under the weights at its start, where the objective wants them."""

    step: Step
    numbers: Mapping[str, float]
    proximal: Mapping[int, Scored] | None
