"""objectives.md, test 8: the asynchronous run reaches the synchronous run's reward, over seeds, within noise."""

import statistics
from pathlib import Path

import pytest

from benchmarks.objectives import CONFIG, interval, measure, warm_start
from benchmarks.quickstart import run

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]

ROOT = Path(__file__).parents[2]
SEEDS = (0, 1, 2)
STEPS = 40
NOISE = (0.05, 0.15)  # of a reward between 0 and 1: what the seeds' interval may excuse, at least and at most


def test_8_an_asynchronous_run_reaches_the_synchronous_runs_reward(tmp_path, monkeypatch):
    """The tiny model on key look-ups, from one supervised warm start that solves part of them: η = 2 against η = 0.

    The reward of a run is the mean over its last quarter, as its episodes earned it; runs of one seed are compared.
    """
    monkeypatch.chdir(ROOT)
    (tmp_path / "start").mkdir()
    start = warm_start(tmp_path / "start", [])
    results: dict[int, list[dict[str, float]]] = {0: [], 2: []}
    for seed in SEEDS:
        for staleness, of_mode in results.items():
            overrides = [
                f"rollout.staleness={staleness}", f"model.path={start}", "warm_start.steps=0",
                f"trainer.steps={STEPS}", "eval.every=0", "eval.tasks=32",
            ]  # fmt: skip
            folder = tmp_path / f"{staleness}-{seed}"
            folder.mkdir()
            done = run(CONFIG, seed, folder, overrides)
            assert done["max_lag"] <= staleness
            of_mode.append(measure(done))
            print(f"seed {seed}, η = {staleness}: {of_mode[-1]}", flush=True)
    rewards = {staleness: [r["reward"] for r in of_mode] for staleness, of_mode in results.items()}
    before = [r["before"] for of_mode in results.values() for r in of_mode]
    differences = [a - s for a, s in zip(rewards[2], rewards[0], strict=True)]
    mean, half = statistics.mean(differences), interval(differences)
    print(f"before {before}; η = 2: {rewards[2]}, η = 0: {rewards[0]}; paired difference {mean:+.3f} ± {half:.3f}")
    for staleness, of_mode in rewards.items():
        assert statistics.mean(of_mode) > statistics.mean(before) + 0.1, f"η = {staleness} learns nothing"
    tolerance = min(max(half, NOISE[0]), NOISE[1])
    assert mean > -tolerance, f"asynchronous runs fall behind by {-mean:.3f}, over seeds ± {half:.3f}"
