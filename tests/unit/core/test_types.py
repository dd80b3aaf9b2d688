"""The shared types refuse what would be untrue, and their stored form is exact."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.types import (
    EpisodeResult,
    Failure,
    Group,
    StopReason,
    TokenSequence,
    Trajectory,
    Turn,
    Usage,
    decode_trajectory,
    encode_trajectory,
)


def sequence(length: int = 4, **changes) -> TokenSequence:
    mask = [False] * (length - 2) + [True] * 2
    fields = {
        "token_ids": range(length),
        "action_mask": mask,
        "behaviour_logprobs": [-0.5 if m else 0 for m in mask],
        "policy_versions": [3 if m else -1 for m in mask],
        "turns": (Turn(length - 2, length),),
    }
    return TokenSequence(**{**fields, **changes})


def trajectory(**changes) -> Trajectory:
    fields = {
        "episode_id": "g1/0",
        "group_id": "g1",
        "env_id": "sparring/Calculator-v0",
        "task_id": "train/7",
        "seed": 7,
        "sequences": (sequence(),),
        "reward": 0.4,
        "stop_reason": StopReason.FINISHED,
    }
    return Trajectory(**{**fields, **changes})


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**31), st.booleans(), st.floats(-100, 0, width=32), st.integers(-1, 2**31 - 1)
        ),
        max_size=40,
    )
)
def test_the_stored_form_round_trips_exactly(tokens):
    ids, mask, logprobs, versions = zip(*tokens, strict=True) if tokens else ((), (), (), ())
    before = trajectory(
        sequences=(TokenSequence(ids, mask, logprobs, versions, (Turn(0, len(ids), anchor="état"),)),),
        reward_parts={"exact": 0.1 + 0.2},
        usage=Usage(3, 4, 1),
        messages=({"role": "user", "content": "\u2028"},),
    )
    assert decode_trajectory(encode_trajectory(before)) == before


def test_a_failed_episode_round_trips_without_a_reward():
    before = trajectory(reward=None, failure=Failure("sandbox", "the daemon is gone"), stop_reason=StopReason.FAILED)
    after = decode_trajectory(encode_trajectory(before))
    assert after == before
    assert after.failed


def test_bytes_that_are_damaged_anywhere_are_refused():
    data = encode_trajectory(trajectory())
    for i in range(len(data)):
        for damaged in (data[:i], data[:i] + bytes([data[i] ^ 0x55]) + data[i + 1 :]):
            with pytest.raises(ValueError, match="damaged"):
                decode_trajectory(damaged)


@pytest.mark.parametrize(
    "changes",
    [
        {"behaviour_logprobs": [0.0] * 5},
        {"token_ids": [[1, 2], [3, 4]]},
        {"turns": (Turn(2, 9),)},
        {"turns": (Turn(2, 4), Turn(3, 4))},
    ],
)
def test_a_sequence_whose_arrays_disagree_is_refused(changes):
    with pytest.raises(ValueError, match=r"sequence"):
        sequence(**changes)


def test_recorded_tokens_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        sequence().token_ids[0] = 9


def test_the_oldest_and_the_newest_version_are_those_of_action_tokens_alone():
    assert sequence(policy_versions=np.array([-1, 9, 3, 4])).version_span == (3, 4)
    assert sequence(action_mask=[False] * 4).version_span is None
    assert trajectory(sequences=(sequence(), sequence(policy_versions=np.array([-1, -1, 2, 4])))).oldest_version == 2


@pytest.mark.parametrize(("reward", "failure"), [(None, None), (0.0, Failure("agent", "crashed"))])
def test_an_episode_has_a_reward_or_a_failure_never_both(reward, failure):
    with pytest.raises(ValueError, match="either a reward or a failure"):
        EpisodeResult(StopReason.FINISHED, reward=reward, failure=failure)


def test_failed_members_do_not_survive_in_a_group():
    failed = trajectory(reward=None, failure=Failure("engine", "died"), stop_reason=StopReason.FAILED)
    assert Group("g1", (trajectory(), failed)).survivors == (trajectory(),)
