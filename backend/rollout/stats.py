"""Figures about rollouts: counters over the whole process, and the statistics that go with each batch.

Statistics of a batch, by name; those marked * are over everything that ended since the last batch:
    reward*, reward/<part>*     mean over the episodes that did not fail (+)
    reward/trained              mean over the batch
    env/<env>/reward*, env/<env>/episodes*          where a run has several environments (+)
    episodes/tokens*, episodes/turns*               mean over the episodes (+)
    episodes*, episodes/per_s*, episodes/expired*
    failures*, failures/<kind>* failed attempts, retried or not
    groups/dropped*             without signal, or with fewer than two survivors
    groups/refills*             dropped groups that this step replaced
    groups/skipped*             left out by a curriculum
    groups/expired*, groups/running, groups/ready, groups/trained, episodes/running
    lag/mean, lag/max, lag/<k>  updates between sampling and training; lag/<k> counts the batch's episodes
    sampler/tokens*, sampler/tokens_per_s*, sampler/busy*   busy: share of the time with an episode running
    time/waited_s               how long the trainer waited for the batch
(+) over the batch's own episodes where none has ended since the last batch: a resume finds its first one in the buffer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparring.types import Failure, Trajectory

__all__ = ["RolloutMeter", "RolloutStats", "SinceBatch", "batch_stats"]


@dataclass(frozen=True)
class RolloutStats:
    """A snapshot for displays. Counts are since the process started; evaluation episodes are not among them.

    Attributes:
        since_batch: what happened since the last batch was taken.
        last_batch: what had happened when it was, since the one before.
    """

    version: int
    running_groups: int
    ready_groups: int
    running_episodes: int
    episodes: int
    sampled_tokens: int
    dropped_groups: int
    expired_groups: int
    expired_episodes: int
    failures: dict[str, int]
    since_batch: SinceBatch
    last_batch: SinceBatch


@dataclass(frozen=True)
class SinceBatch:
    """How far sampling for the next batch has come.

    Attributes:
        episodes: that ended, failed ones among them.
        equal_rewards: of the dropped groups, those whose episodes all had one reward, counted by it.
        too_few: of the dropped groups, those of which fewer than two episodes did not fail. In any others no token was
            sampled.
        reason: the commonest of what failed, by its newest case, or None.
        alike: how many failed so.
    """

    episodes: int
    failures: int
    dropped_groups: int
    equal_rewards: Mapping[float, int]
    too_few: int
    reason: Failure | None = None
    alike: int = 0


class RolloutMeter:
    """Counts what happens, for the whole process and since the last batch. Used on one event loop."""

    def __init__(self) -> None:
        self.running_episodes = 0
        self.total: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._window: Counter[str] = Counter()
        self._rewards = _Rewards()
        self._equal: Counter[float] = Counter()
        self._reasons: Counter[str] = Counter()
        self._newest: dict[str, Failure] = {}
        self.last_batch = self.since_batch
        self._opened_at = self._busy_since = time.monotonic()
        self._busy_s = 0.0

    def count(self, name: str, amount: int = 1) -> None:
        self.total[name] += amount
        self._window[name] += amount

    def episode_started(self) -> None:
        if self.running_episodes == 0:
            self._busy_since = time.monotonic()
        self.running_episodes += 1

    def episode_ended(self) -> None:
        self.running_episodes -= 1
        if self.running_episodes == 0:
            self._busy_s += time.monotonic() - self._busy_since

    def add(self, trajectory: Trajectory) -> None:
        """Count a finished episode."""
        self.count("episodes")
        self.count("tokens", trajectory.action_tokens)
        self.count("turns", trajectory.usage.turns)
        if trajectory.failure is not None:
            self.failures[trajectory.failure.kind] += 1
            self._window[f"failures/{trajectory.failure.kind}"] += 1
            self._window["failures"] += 1
            # One fault's messages differ in the episode and the task that they name.
            message = trajectory.failure.message.replace(trajectory.episode_id, "").replace(trajectory.task_id, "")
            self._reasons[message] += 1
            self._newest[message] = trajectory.failure
            return
        self._rewards.add(trajectory)

    def group_dropped(self, rewards: Sequence[float]) -> None:
        """Count a group without signal, or with fewer than two survivors; `rewards` are theirs."""
        self.count("dropped_groups")
        if len(rewards) < 2:
            self._window["too_few"] += 1
        elif len(set(rewards)) == 1:
            self._equal[rewards[0]] += 1

    @property
    def since_batch(self) -> SinceBatch:
        window = self._window
        reasons = dict(self._reasons)  # in one step: displays ask from another thread
        commonest = max(reasons, key=reasons.__getitem__, default="")
        return SinceBatch(
            episodes=window["episodes"],
            failures=window["failures"],
            dropped_groups=window["dropped_groups"],
            equal_rewards=dict(self._equal),
            too_few=window["too_few"],
            reason=self._newest.get(commonest),
            alike=reasons.get(commonest, 0),
        )

    def close_window(self) -> dict[str, float]:
        """Statistics since the last call; `last_batch` keeps what else is told of them."""
        now = time.monotonic()
        if self.running_episodes:
            self._busy_s += now - self._busy_since
            self._busy_since = now
        seconds, window = max(now - self._opened_at, 1e-9), self._window
        stats = self._rewards.means()
        stats |= {name: float(count) for name, count in window.items() if name.startswith("failures/")}
        stats |= {
            "episodes": float(window["episodes"]),
            "episodes/per_s": window["episodes"] / seconds,
            "episodes/tokens": window["tokens"] / max(window["episodes"], 1),
            "episodes/turns": window["turns"] / max(window["episodes"], 1),
            "episodes/expired": float(window["expired_episodes"]),
            "failures": float(window["failures"]),
            "groups/dropped": float(window["dropped_groups"]),
            "groups/expired": float(window["expired_groups"]),
            "groups/skipped": float(window["skipped_groups"]),
            "sampler/tokens": float(window["tokens"]),
            "sampler/tokens_per_s": window["tokens"] / seconds,
            "sampler/busy": min(self._busy_s / seconds, 1.0),
        }
        self.last_batch = self.since_batch
        self._window, self._rewards, self._equal = Counter(), _Rewards(), Counter()
        self._reasons, self._newest = Counter(), {}
        self._opened_at, self._busy_s = now, 0.0
        return stats


def batch_stats(trained: Sequence[tuple[Trajectory, int]], window: Mapping[str, float]) -> dict[str, float]:
    """Statistics of a batch.

    Args:
        trained: its trajectories and the lag of each.
        window: what `RolloutMeter.close_window` gave.
    """
    trajectories, lags = [t for t, _ in trained], [lag for _, lag in trained]
    stats = dict(window)
    if "reward" not in window:
        rewards = _Rewards()
        for trajectory in trajectories:
            rewards.add(trajectory)
        stats |= rewards.means()
    if not window["episodes"]:
        stats["episodes/tokens"] = sum(t.action_tokens for t in trajectories) / len(trajectories)
        stats["episodes/turns"] = sum(t.usage.turns for t in trajectories) / len(trajectories)
    stats |= {f"lag/{lag}": float(count) for lag, count in sorted(Counter(lags).items())}
    return stats | {
        "lag/mean": sum(lags) / len(lags),
        "lag/max": float(max(lags)),
        "reward/trained": sum(t.reward or 0.0 for t in trajectories) / len(trajectories),
    }


class _Rewards:
    """Rewards of episodes that did not fail, by part and by environment."""

    def __init__(self) -> None:
        self._by_part: dict[str, list[float]] = {}
        self._by_env: dict[str, list[float]] = {}

    def add(self, trajectory: Trajectory) -> None:
        assert trajectory.reward is not None
        self._by_part.setdefault("reward", []).append(trajectory.reward)
        self._by_env.setdefault(trajectory.env_id, []).append(trajectory.reward)
        for name, value in trajectory.reward_parts.items():
            self._by_part.setdefault(f"reward/{name}", []).append(value)

    def means(self) -> dict[str, float]:
        stats = {name: sum(values) / len(values) for name, values in self._by_part.items()}
        if len(self._by_env) > 1:
            stats |= {f"env/{env}/reward": sum(values) / len(values) for env, values in self._by_env.items()}
            stats |= {f"env/{env}/episodes": float(len(values)) for env, values in self._by_env.items()}
        return stats
