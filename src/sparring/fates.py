"""What became of a run's episodes and groups, in the same words wherever a command counts them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

__all__ = ["fates", "legend"]

_WORDS = {  # for each of `types.EPISODE_STATES`, and each state of a group
    "consumed": "trained",
    "pending": "left in the buffer",  # among them what finished after the last step, or while the run was stopped
    "ready": "left in the buffer",
    "running": "cut short",
    "dropped": "dropped",
    "expired": "expired",
    "failed": "failed",
    "evaluation": "evaluated",
    "probe": "probed",
}
_MEANINGS = {  # of each of `types.EPISODE_STATES`
    "pending": "finished, not trained yet",
    "consumed": "trained, by the step that is named",
    "dropped": "not trained, as its group taught nothing (equal rewards, or too few episodes left)",
    "expired": "not trained, as too old a version sampled it (rollout.staleness)",
    "failed": "not trained, as something around the model broke",
    "evaluation": "of an evaluation: never trained",
    "probe": "of the probe at the start, which ends them after two short turns: never trained",
}


def fates(counts: Mapping[str, int]) -> str:
    """Episodes or groups by state, as in `480 trained, 37 left in the buffer, 3 failed`; empty states are left out."""
    return ", ".join(f"{counts[state]} {word}" for state, word in _WORDS.items() if counts.get(state))


def legend(states: Collection[str]) -> str:
    """What those of the episodes' states that occur mean, in one line."""
    return "; ".join(f"{state}: {meaning}" for state, meaning in _MEANINGS.items() if state in states)
