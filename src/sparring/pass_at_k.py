"""pass@k and pass^k of tasks that were each tried several times, with 95% intervals. Pure functions.

pass@k: at least one of k tries solves the task (Chen et al. 2021, arXiv:2107.03374, equation 1). pass^k: all of k tries
solve it (Yao et al. 2024, arXiv:2406.12045, section 4). Both estimators are unbiased for any number of tries from k on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sparring.evaluation import wilson_interval

__all__ = ["Estimate", "Tries", "estimate", "pass_at_k", "pass_hat_k"]

_RESAMPLES = 10_000
_LEVEL = 0.95


@dataclass(frozen=True)
class Tries:
    """How often a task was tried, failures of the infrastructure aside, and how often it was solved."""

    tries: int
    solved: int


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks and its 95% interval.

    Attributes:
        tasks: those with at least k tries; the others say nothing about k, and count in nothing.
        method: "score": Wilson's interval, as a run's evaluations have it; "bootstrap": percentiles of 10,000 resamples
            of the tasks. NaN everywhere where there is no task.
    """

    value: float
    low: float
    high: float
    tasks: int
    method: Literal["score", "bootstrap"]


def pass_at_k(tries: int, solved: int, k: int) -> float:
    """Chance that k tries, drawn without replacement from those made, hold one that solves."""
    _check(tries, solved, k)
    return 1.0 - math.comb(tries - solved, k) / math.comb(tries, k)


def pass_hat_k(tries: int, solved: int, k: int) -> float:
    """Chance that k tries, drawn without replacement from those made, all solve."""
    _check(tries, solved, k)
    return math.comb(solved, k) / math.comb(tries, k)


def estimate(tasks: Sequence[Tries], k: int, of: Callable[[int, int, int], float] = pass_at_k) -> Estimate:
    """The mean of `pass_at_k` or `pass_hat_k` over tasks, with an interval for other tasks of their kind.

    Where every task is at 0 or at 1 (one try each, or k tries of k), the mean is a proportion. Its interval also stands
    in where a bootstrap says nothing, all tasks being equal: a task's value lies in [0, 1], so to see nothing but zeros
    is at least as likely for solved-or-not tasks of the same mean.
    """
    values = np.array([of(task.tries, task.solved, k) for task in tasks if task.tries >= k])
    if not values.size:
        return Estimate(math.nan, math.nan, math.nan, 0, "score")
    mean = float(values.mean())
    if np.isin(values, (0.0, 1.0)).all():
        return Estimate(mean, *wilson_interval(int(values.sum()), values.size), values.size, "score")
    generator = np.random.default_rng(0)
    distinct, counts = np.unique(values, return_counts=True)  # few: a resample is how often each value is drawn
    means = generator.multinomial(values.size, counts / values.size, _RESAMPLES) @ distinct / values.size
    low, high = np.quantile(means, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Estimate(mean, float(low), float(high), values.size, "bootstrap")


def _check(tries: int, solved: int, k: int) -> None:
    if not (0 <= solved <= tries and 1 <= k <= tries):
        raise ValueError(f"k = {k} of {tries} tries, {solved} of them solved")
