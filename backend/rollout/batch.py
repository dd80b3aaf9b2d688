"""What the trainer gets for one step, and the figures that go with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparring.types import Group

__all__ = ["Batch"]


@dataclass(frozen=True)
class Batch:
    """The groups of one optimizer step.

    Attributes:
        step: the step that trains on them, the trainer's version plus one.
        groups: at most B, each with at least two trajectories, none failed and none over the staleness bound.
        stats: figures since the last batch, for `metrics.jsonl`; their names are listed in `rollout/stats.py`.
    """

    step: int
    groups: tuple[Group, ...]
    stats: Mapping[str, float]
