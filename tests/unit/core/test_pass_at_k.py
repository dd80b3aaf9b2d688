"""pass@k and pass^k are what their definitions say, and their intervals cover."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.evaluation import wilson_interval
from sparring.pass_at_k import Tries, estimate, pass_at_k, pass_hat_k


@given(solved=st.lists(st.booleans(), min_size=1, max_size=8), data=st.data())
def test_both_are_shares_of_the_ways_to_draw_k_tries(solved, data):
    k = data.draw(st.integers(1, len(solved)))
    draws = list(itertools.combinations(solved, k))
    assert pass_at_k(len(solved), sum(solved), k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_hat_k(len(solved), sum(solved), k) == pytest.approx(sum(map(all, draws)) / len(draws))


def test_at_k_one_both_are_the_success_rate():
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_hat_k(10, 3, 1) == pytest.approx(0.3)


def test_one_try_a_task_has_the_interval_of_a_proportion():
    got = estimate([Tries(1, 1)] * 3 + [Tries(1, 0)] * 7, 1)
    assert (got.value, got.tasks, got.method) == (0.3, 10, "score")
    assert (got.low, got.high) == wilson_interval(3, 10)


def test_several_tries_are_resampled_by_task():
    # Tries of one task are alike: twice the tries of as many tasks must not narrow the interval as twice the tasks do.
    few = estimate([Tries(4, 3), Tries(4, 1)] * 10, 1)
    same = estimate([Tries(8, 6), Tries(8, 2)] * 10, 1)
    more = estimate([Tries(4, 3), Tries(4, 1)] * 40, 1)
    assert few.method == "bootstrap"
    assert (same.low, same.high) == pytest.approx((few.low, few.high))
    assert more.high - more.low < 0.6 * (few.high - few.low)


def test_the_bootstrap_covers_the_truth():
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(40):
        rates = generator.beta(1, 1, 40)
        tasks = [Tries(4, int(s)) for s in generator.binomial(4, rates)]
        got = estimate(tasks, 2)
        covered += got.low <= 2 / 3 <= got.high  # E[1 - (1 - p)²] of a uniform p
    assert covered >= 34


def test_tasks_with_fewer_than_k_tries_count_in_nothing():
    tasks = [Tries(2, 1), Tries(1, 1), Tries(0, 0)]
    assert [estimate(tasks, k).tasks for k in (1, 2, 3)] == [2, 1, 0]
    assert math.isnan(estimate(tasks, 3).value)


def test_equal_tasks_still_have_an_interval():
    got = estimate([Tries(4, 0)] * 20, 2, pass_hat_k)
    assert (got.low, got.high) == wilson_interval(0, 20)


@pytest.mark.parametrize(("tries", "solved", "k"), [(2, 3, 1), (2, 1, 3), (2, 1, 0), (2, -1, 1)])
def test_impossible_counts_are_refused(tries, solved, k):
    with pytest.raises(ValueError, match="tries"):
        pass_at_k(tries, solved, k)
