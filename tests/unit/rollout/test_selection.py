"""What a group is worth: lag within and across histories, and signal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.backend.buffer import StoredTrajectory
from sparring.backend.rollout.selection import has_signal, lag, trajectory_lag
from sparring.types import StopReason, TokenSequence, Trajectory


def trajectory(reward: float = 0.0, versions: tuple[int, ...] = (0,), agents=None) -> Trajectory:
    n = len(versions)
    sequence = TokenSequence([1] * n, [v >= 0 for v in versions], [0.0] * n, list(versions))
    return Trajectory("e", "g", "x/X-v0", "t", 0, (sequence,), reward, StopReason.FINISHED, agent_rewards=agents or {})


@pytest.mark.parametrize(
    ("token", "trainer", "branch", "updates"),
    [
        (3, 5, None, 2),
        (5, 5, None, 0),
        (7, 5, 5, 2),  # sampled two updates after the checkpoint that the run went back to
        (7, 6, 5, 3),  # and one update of the new history further away
        (6, 6, 5, 2),  # the same number, but not the same weights
        (4, 6, 5, 2),  # sampled before the branch: both histories have it
    ],
)
def test_lag_counts_updates_on_the_way_between_two_weights(token, trainer, branch, updates):
    assert lag(token, trainer, branch) == updates


@given(t=st.integers(0, 50), v=st.integers(0, 50), branch=st.none() | st.integers(0, 50))
def test_lag_is_never_less_than_the_difference_of_versions(t, v, branch):
    assert lag(t, v, branch) >= abs(t - v)
    assert (lag(t, v, branch) == 0) <= (t == v)


def test_an_episode_is_as_stale_as_its_stalest_action_token():
    assert trajectory_lag(StoredTrajectory(trajectory(versions=(-1, 2, -1, 4))), 5) == 3
    assert trajectory_lag(StoredTrajectory(trajectory(versions=(-1, 4, 6)), branch_step=4), 4) == 2
    assert trajectory_lag(StoredTrajectory(trajectory(versions=(-1,))), 5) == 0


def test_signal_needs_two_survivors_whose_rewards_differ_and_a_token():
    assert has_signal([trajectory(0.0), trajectory(1.0)])
    assert not has_signal([trajectory(1.0), trajectory(1.0)])
    assert not has_signal([trajectory(1.0)])
    assert not has_signal([])
    assert not has_signal([trajectory(0.0, (-1,)), trajectory(1.0, (-1,))])
    assert has_signal([trajectory(1.0, agents={"a": 1.0}), trajectory(1.0, agents={"a": 0.0})])
