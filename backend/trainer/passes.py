"""Forward passes without gradient, before a step's loss: the proximal policy's scores, and the reference policy's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sparring.backend.objectives.base import LossInputs, Objective
from sparring.backend.trainer.packing import PackedRow, Sample, pack, split_rows
from sparring.backend.trainer.step import Scored, Step, logprobs_by_sample, make_sample
from sparring.types import Group

__all__ = ["prepare_step", "proximal_of", "reference_of", "score_rows", "with_reward_kl"]


@torch.no_grad()
def score_rows(model: Any, rows: Sequence[Sequence[Sample]], device: torch.device) -> dict[int, Scored]:
    """Log-probabilities of the action tokens of all samples, by their index in the step."""
    scored: dict[int, Scored] = {}
    for members in rows:
        row = pack(members).to(device)
        scored |= logprobs_by_sample(row, model(row=row).logprobs)
    return scored


def proximal_of(row: PackedRow, scored: Mapping[int, Scored]) -> torch.Tensor:
    """What `score_rows` found for the terms of a row, (M,), in their order and on its device."""
    per_sequence = [scored[index][1] for index in row.sample_index.tolist()]
    return torch.from_numpy(np.concatenate(per_sequence)).to(row.targets.device)


@torch.no_grad()
def reference_of(row: PackedRow, reference: Any) -> torch.Tensor:
    """Log-probabilities (M,) that the reference policy gives the terms of a row."""
    scores: torch.Tensor = reference(row=row).logprobs
    return scores


def prepare_step(objective: Objective, step: Step, scored: Mapping[int, Scored]) -> Mapping[str, float]:
    """Let the objective see all of the step at once. `scored` has every sample of it."""
    if objective.prepare is None:
        return {}
    logprobs = torch.from_numpy(np.concatenate([scored[s.index][1] for s in step.samples]))

    def gather(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(s, name)[s.action_mask] for s in step.samples]))

    lengths = torch.tensor([int(s.action_mask.sum()) for s in step.samples])
    return objective.prepare(
        LossInputs(
            logprobs=logprobs,
            behaviour=gather("behaviour_logprobs"),
            advantages=gather("advantages").float(),
            sequence=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
            n_sequences=len(lengths),
            lags=gather("lags"),
            totals=step.totals,
            proximal=logprobs,
        )
    )


def with_reward_kl(
    groups: Sequence[Group], coefficient: float, reference: Any, token_budget: int, device: torch.device
) -> tuple[tuple[Group, ...], float]:
    """Subtract coefficient · Σ (log μ − log reference) from every episode's reward: k1, summed over its action tokens.

    Returns:
        the groups with their new rewards, and the mean divergence of an episode in nats.
    """
    survivors = [t for group in groups for t in group.survivors]
    samples = [
        make_sample(s, np.zeros(len(s.turns)), version=0, index=i, name=t.episode_id)
        for i, (t, s) in enumerate((t, s) for t in survivors for s in t.sequences)
        if s.action_mask.any()
    ]
    scored = score_rows(reference, split_rows(samples, token_budget), device)
    by_episode: dict[str, float] = {t.episode_id: 0.0 for t in survivors}
    for sample in samples:
        behaviour = sample.behaviour_logprobs[sample.action_mask].astype(np.float64)
        by_episode[sample.name] += float((behaviour - scored[sample.index][1]).sum())
    penalised = tuple(
        replace(
            group,
            trajectories=tuple(
                replace(t, reward=t.reward - coefficient * by_episode[t.episode_id]) if t.reward is not None else t
                for t in group.trajectories
            ),
        )
        for group in groups
    )
    return penalised, float(np.mean(list(by_episode.values())))
