"""What an evaluation says: the success rate of held-out episodes with its 95% interval, failures counted apart."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparring.types import Trajectory

__all__ = ["EvalEpisode", "EvalSummary", "read_episodes", "summarise", "wilson_interval", "write_episodes"]

_Z_95 = 1.959963984540054


@dataclass(frozen=True)
class EvalEpisode:
    """One held-out episode as played. `reward` is None where it failed: that is neither a success nor a miss.

    Attributes:
        solved: the reward part 'exact' where the environment gives one, else a reward of 1 or more.
        env: the environment's id, with its arguments where it was given any.
        sample: which try of the task, from 0.
        failure: kind and message, where it failed.
        seconds: of wall-clock time.
    """

    episode_id: str
    task_id: str
    reward: float | None
    solved: bool
    turns: int
    messages: tuple[Mapping[str, Any], ...]
    env: str = ""
    sample: int = 0
    stop_reason: str = ""
    failure: Mapping[str, str] | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    completion_tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, trajectory: Trajectory, *, env: str | None = None, sample: int = 0) -> EvalEpisode:
        reward, failure = trajectory.reward, trajectory.failure
        return cls(
            episode_id=trajectory.episode_id,
            task_id=trajectory.task_id,
            reward=reward,
            solved=reward is not None and trajectory.reward_parts.get("exact", reward) >= 1.0,
            turns=trajectory.usage.turns,
            messages=trajectory.messages,
            env=trajectory.env_id if env is None else env,
            sample=sample,
            stop_reason=trajectory.stop_reason.value,
            failure=None if failure is None else vars(failure),
            reward_parts=dict(trajectory.reward_parts),
            completion_tokens=trajectory.usage.completion_tokens,
            seconds=round(trajectory.finished_at - trajectory.started_at, 3),
        )


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


def summarise(step: int, episodes: Sequence[EvalEpisode]) -> EvalSummary:
    """Summary of one evaluation; of no finished episode, everything is NaN."""
    rewards = [e.reward for e in episodes if e.reward is not None]
    failed = len(episodes) - len(rewards)
    if not rewards:
        return EvalSummary(step, 0, failed, math.nan, math.nan, math.nan, math.nan)
    solved = sum(e.solved for e in episodes)
    low, high = wilson_interval(solved, len(rewards))
    return EvalSummary(step, len(rewards), failed, solved / len(rewards), low, high, sum(rewards) / len(rewards))


def write_episodes(path: Path, episodes: Sequence[EvalEpisode]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(vars(episode)) + "\n" for episode in episodes))


def read_episodes(path: Path) -> list[EvalEpisode]:
    return [EvalEpisode(**json.loads(line)) for line in path.read_text().splitlines()]


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
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))  # p is inside, but for rounding
