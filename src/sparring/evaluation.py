"""What an evaluation says: the success rate of held-out episodes with its 95% interval, failures counted apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparring.types import Trajectory

__all__ = ["EvalSummary", "success", "summarise", "wilson_interval"]

_Z_95 = 1.959963984540054


@dataclass(frozen=True)
class EvalSummary:
    """Success over `episodes` that did not fail; `failed` ones are infrastructure failures and count nowhere.

    `success`, `low` and `high` are shares in [0, 1] (the Wilson 95% interval); `reward` is the mean reward.
    """

    step: int
    episodes: int
    failed: int
    success: float
    low: float
    high: float
    reward: float


def success(trajectory: Trajectory) -> bool:
    """Whether the task was solved: the reward part 'exact' where there is one, else a reward of 1 or more."""
    if trajectory.reward is None:
        raise ValueError(f"episode {trajectory.episode_id} failed; it is neither a success nor a miss")
    return trajectory.reward_parts.get("exact", trajectory.reward) >= 1.0


def summarise(step: int, trajectories: Sequence[Trajectory]) -> EvalSummary:
    """Summary of one evaluation; of no finished episode, everything is NaN."""
    finished = [t for t in trajectories if not t.failed]
    if not finished:
        return EvalSummary(step, 0, len(trajectories), math.nan, math.nan, math.nan, math.nan)
    solved = sum(success(t) for t in finished)
    low, high = wilson_interval(solved, len(finished))
    reward = sum(t.reward or 0.0 for t in finished) / len(finished)
    return EvalSummary(
        step, len(finished), len(trajectories) - len(finished), solved / len(finished), low, high, reward
    )


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """95% score interval of a proportion (Wilson 1927, doi:10.1080/01621459.1927.10502953).

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"{successes} successes of {trials} trials")
    p, z2 = successes / trials, _Z_95**2
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z_95 * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)
