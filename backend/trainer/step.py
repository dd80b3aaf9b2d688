"""From a batch of groups to the samples of one optimizer step, checked before any weight changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from sparring.backend.objectives.base import LossInputs, Objective, Totals
from sparring.backend.trainer.head import Scores
from sparring.backend.trainer.packing import PackedRow, Sample
from sparring.errors import TrainerError
from sparring.types import Group, TokenSequence, Trajectory

__all__ = ["Scored", "Step", "logprobs_by_episode", "logprobs_by_sample", "loss_inputs", "make_sample", "make_step"]

Scored: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]


@dataclass(frozen=True)
class Step:
    """What one optimizer step trains on. `samples[i].index == i`; `totals` normalise the loss."""

    version: int
    samples: tuple[Sample, ...]
    totals: Totals


def make_step(groups: Sequence[Group], version: int, objective: Objective) -> Step:
    """Give every action token its advantage, lag and temperature.

    Args:
        version: of the trainer's weights.

    Raises:
        TrainerError: a reward or an advantage is not finite, or nothing is left to train; it names the episode.
    """
    credits = objective.advantage(groups)
    samples: list[Sample] = []
    for group, of_group in zip(groups, credits, strict=True):
        for trajectory, of_turns in zip(group.survivors, of_group, strict=True):
            done = 0
            for sequence in trajectory.sequences:
                advantages = of_turns[done : done + len(sequence.turns)]
                done += len(sequence.turns)
                if sequence.action_mask.any():
                    samples.append(
                        make_sample(sequence, advantages, version, index=len(samples), name=trajectory.episode_id)
                    )
            if done != len(of_turns):
                raise TrainerError(f"{_who(trajectory)}: {len(of_turns)} advantages for {done} turns")
    if not samples:
        raise TrainerError(f"no group of {len(groups)} in this step has a trained token: did every episode fail?")
    tokens = sum(int(s.action_mask.sum()) for s in samples)
    return Step(version, tuple(samples), Totals(tokens=tokens, sequences=len(samples), groups=len(groups)))


def make_sample(
    sequence: TokenSequence, turn_advantages: NDArray[np.float64], version: int, *, index: int = 0, name: str = ""
) -> Sample:
    """Spread what is known by turn over the tokens.

    Raises:
        TrainerError: an action token lies outside every turn, or its numbers are not finite.
    """
    n = len(sequence)
    advantages, temperatures = np.zeros(n), np.ones(n, np.float32)
    covered = np.zeros(n, bool)
    for turn, advantage in zip(sequence.turns, turn_advantages, strict=True):
        span = slice(turn.start, turn.end)
        advantages[span], temperatures[span], covered[span] = advantage, turn.temperature or 1.0, True
    actions = sequence.action_mask
    who = f"episode {name or index}"
    if (actions & ~covered).any():
        where = int(np.flatnonzero(actions & ~covered)[0])
        raise TrainerError(f"{who}: action token {where} lies outside every turn, so its temperature is unknown")
    for what, values in (("advantage", advantages), ("behaviour log-probability", sequence.behaviour_logprobs)):
        if not np.isfinite(values[actions]).all():
            where = int(np.flatnonzero(actions & ~np.isfinite(values))[0])
            raise TrainerError(f"{who}: the {what} of token {where} is {values[where]}")
    # After a resume from an older checkpoint, a token may come from weights that were newer than the trainer's.
    lags = np.abs(version - sequence.policy_versions)
    return Sample(
        sequence.token_ids, actions, sequence.behaviour_logprobs, advantages, lags, temperatures, index=index, name=name
    )


def loss_inputs(
    row: PackedRow,
    scores: Scores,
    totals: Totals,
    *,
    proximal: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
    step: Mapping[str, float] | None = None,
    values: torch.Tensor | None = None,
    targets: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> LossInputs:
    """One micro-batch as the objective sees it. All are (M,), in the order of its terms.

    Args:
        targets: the critic's old values and returns.
    """
    old_values, returns = targets or (None, None)
    return LossInputs(
        logprobs=scores.logprobs,
        behaviour=row.behaviour_logprobs,
        advantages=row.advantages,
        sequence=row.sequence,
        n_sequences=len(row.sample_index),
        lags=row.lags,
        totals=totals,
        proximal=proximal,
        reference=reference,
        step=step or {},
        values=values,
        old_values=old_values,
        returns=returns,
    )


def logprobs_by_sample(row: PackedRow, logprobs: torch.Tensor) -> dict[int, Scored]:
    """What a forward gave the action tokens of each sequence: positions and log-probabilities, by index in the step."""
    values, positions, sequence = (t.detach().cpu().numpy() for t in (logprobs.float(), row.position, row.sequence))
    return {
        index: (positions[sequence == local], values[sequence == local])
        for local, index in enumerate(row.sample_index.tolist())
    }


def logprobs_by_episode(groups: Sequence[Group], scored: Mapping[int, Scored]) -> dict[str, list[NDArray[np.float32]]]:
    """The same by episode id, one array of length T for each sequence, NaN where a token is no action.

    Args:
        groups: those that `make_step` numbered.
    """
    found: dict[str, list[NDArray[np.float32]]] = {}
    index = 0
    for trajectory in (t for group in groups for t in group.survivors):
        arrays = found[trajectory.episode_id] = []
        for sequence in trajectory.sequences:
            array = np.full(len(sequence), np.nan, np.float32)
            if sequence.action_mask.any():
                positions, values = scored[index]
                array[positions] = values
                index += 1
            arrays.append(array)
    return found


def _who(trajectory: Trajectory) -> str:
    return f"episode {trajectory.episode_id} ({trajectory.env_id}, {trajectory.task_id})"
