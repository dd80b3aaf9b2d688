"""Success rates carry their interval, and a failed episode is no miss."""

import math

import pytest

from sparring.evaluation import EvalEpisode, read_episodes, summarise, wilson_interval, write_episodes
from sparring.types import Failure, StopReason, Trajectory


def episode(reward, **parts) -> EvalEpisode:
    failure = Failure("engine", "died") if reward is None else None
    reason = StopReason.FAILED if failure else StopReason.FINISHED
    messages = ({"role": "user", "content": "how many?"},)
    return EvalEpisode.of(
        Trajectory("e", "g", "env", "t", 0, (), reward, reason, reward_parts=parts, failure=failure, messages=messages)
    )


def test_the_share_itself_is_never_outside_by_rounding():
    for trials in range(1, 300):
        for successes in {0, 1, trials // 2, trials}:
            low, high = wilson_interval(successes, trials)
            assert 0 <= low <= successes / trials <= high <= 1


def test_published_values_of_the_wilson_interval():
    # Newcombe 1998, doi:10.1002/(SICI)1097-0258(19980430)17:8<857::AID-SIM777>3.0.CO;2-E, table I, method 3
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


def test_a_failed_episode_is_counted_apart():
    summary = summarise(3, [episode(1.0), episode(0.4, exact=0.0), episode(None)])
    assert (summary.episodes, summary.failed, summary.success) == (2, 1, 0.5)
    assert summary.reward == pytest.approx(0.7)


def test_an_evaluation_where_all_failed_has_no_rate():
    assert math.isnan(summarise(0, [episode(None)]).success)


def test_the_part_exact_decides_where_there_is_one():
    assert not episode(1.5, exact=0.0).solved
    assert episode(1.0).solved
    assert not episode(None).solved


def test_episodes_are_read_back_as_written(tmp_path):
    episodes = [episode(1.0), episode(None)]
    write_episodes(tmp_path / "evaluations" / "step.jsonl", episodes)
    again = read_episodes(tmp_path / "evaluations" / "step.jsonl")
    assert [(e.reward, e.solved, list(e.messages)) for e in again] == [
        (e.reward, e.solved, list(e.messages)) for e in episodes
    ]


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (3, 2), (-1, 2)])
def test_impossible_counts_are_refused(successes, trials):
    with pytest.raises(ValueError, match="trials"):
        wilson_interval(successes, trials)
