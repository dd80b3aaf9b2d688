"""objectives.md, test 5: group arithmetic at its edges. And the laws of advantages."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.backend.objectives.advantages import leave_one_out, rloo
from sparring.errors import TrainerError
from sparring.types import Failure, Group, StopReason, TokenSequence, Trajectory, Turn

rewards = st.lists(st.floats(-100, 100, allow_nan=False), min_size=2, max_size=9)


def episode(reward, *, agents=("main",), agent_rewards=None, index=0):
    n = 1 + len(agents)
    turns = tuple(Turn(i + 1, i + 2, agent_id=agent) for i, agent in enumerate(agents))
    sequence = TokenSequence(np.arange(n), np.arange(n) > 0, np.zeros(n), np.zeros(n), turns)
    return Trajectory(
        f"e{index}", "g", "env", "task", 0, (sequence,), reward, StopReason.FINISHED, agent_rewards=agent_rewards or {}
    )


def group(*episodes):
    return Group("g", tuple(dataclasses.replace(e, episode_id=f"e{i}") for i, e in enumerate(episodes)))


def test_objectives_5_a_leave_one_out_group_of_one_is_0():
    assert leave_one_out(np.array([7.0])).tolist() == [0.0]


def test_objectives_5_an_all_equal_group_gives_0():
    assert leave_one_out(np.full(4, 0.3)).tolist() == [0.0] * 4


def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others():
    assert leave_one_out(np.array([0.0, 1.0, 5.0])).tolist() == pytest.approx([-3.0, -1.5, 4.5])


@given(rewards, st.floats(-10, 10))
def test_leave_one_out_sums_to_0_and_ignores_a_shift(values, shift):
    a = leave_one_out(np.array(values))
    assert a.sum() == pytest.approx(0, abs=1e-9)
    assert leave_one_out(np.array(values) + shift) == pytest.approx(a, abs=1e-9)


def test_failed_members_are_no_part_of_the_baseline():
    failed = dataclasses.replace(
        episode(0.0), reward=None, failure=Failure("engine", "died"), stop_reason=StopReason.FAILED
    )
    (credits,) = rloo([group(episode(0.0), failed, episode(1.0))])
    assert [c.tolist() for c in credits] == [[-1.0], [1.0]]


def test_agents_of_one_episode_are_compared_with_the_same_agent_in_the_others():
    one = episode(0.0, agents=("a", "b", "a"), agent_rewards={"a": 1.0, "b": 0.0})
    two = episode(0.0, agents=("a", "b"), agent_rewards={"a": 0.0, "b": 4.0})
    (credits,) = rloo([group(one, two)])
    assert [c.tolist() for c in credits] == [[1.0, -4.0, 1.0], [-1.0, 4.0]]


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_names_its_episode(reward):
    with pytest.raises(TrainerError, match=r"episode e1 .*reward (nan|inf)"):
        rloo([group(episode(1.0), episode(reward))])


def test_an_agents_reward_that_is_not_finite_names_its_episode():
    with pytest.raises(TrainerError, match=r"episode e0.*not finite"):
        rloo([group(episode(1.0, agent_rewards={"main": float("nan")}), episode(0.0))])
