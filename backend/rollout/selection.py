"""What a group is worth to a step: whether it carries signal, and how stale its tokens are. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.backend.buffer.records import StoredTrajectory
from sparring.types import Trajectory

__all__ = ["has_signal", "lag", "trajectory_lag"]


def lag(token_version: int, version: int, branch_step: int | None = None) -> int:
    """Updates between the weights that sampled a token and those that train on it.

    Within one history that is the difference of their versions. After a resume at step c the weights of version
    c + 1 are others than those of version c + 1 before it: the way from one to the other leads back to the step that
    they have in common, and forward again.
    """
    common = min(token_version, version)
    if branch_step is not None:
        common = min(common, branch_step)
    return (token_version - common) + (version - common)


def trajectory_lag(stored: StoredTrajectory, version: int) -> int:
    """The greatest lag of an episode's action tokens; 0 where it has none.

    It lies at the oldest token, or, for an episode from before a resume, perhaps at the newest.
    """
    spans = (sequence.version_span for sequence in stored.trajectory.sequences)
    return max((lag(v, version, stored.branch_step) for span in spans if span is not None for v in span), default=0)


def has_signal(trajectories: Sequence[Trajectory]) -> bool:
    """Whether group-relative advantages of these survivors can differ from zero and have a token to act on.

    Groups whose rewards are all equal teach nothing (DAPO's dynamic sampling, arXiv:2503.14476). Where agents of one
    episode are rewarded apart, one agent whose rewards differ is enough.
    """
    if len(trajectories) < 2 or not any(t.action_tokens for t in trajectories):
        return False
    first = trajectories[0]
    return any(t.reward != first.reward or t.agent_rewards != first.agent_rewards for t in trajectories)
