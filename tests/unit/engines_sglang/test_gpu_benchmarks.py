"""What the GPU benchmarks compute from what they see; the rest of them needs a GPU."""

import asyncio
import random
import statistics
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from benchmarks.gpu import _mps, calculator, gsm8k, long_tailed, plot, sharing
from benchmarks.gpu._load import closed_loop
from benchmarks.gpu.compare import at, compare
from benchmarks.gpu.sharing import ROW_TOKENS, gsm8k_like
from benchmarks.gpu.slow_service import MAX_DELAY_S, MAX_TURNS, draw_delay, draw_turns
from sparring.backend.trainer.packing import pack, split_rows
from sparring.config import RunConfig

RESULTS = Path(__file__).parents[3] / "benchmarks/results/h200-2026-12-01.json"
STEP = {"kind": "step", "time/step_s": 2.0, "episodes": 10, "sampler/tokens": 100, "trainer/busy": 0.5}


def evaluation(step, success, **more):
    return {"kind": "evaluation", "step": step, "episodes": 1319, "success": success, "time/evaluate_s": 5.0, **more}


def curve(*points, step_s=2.0):
    """A run's summary with evaluations (step, success)."""
    last = points[-1][0]
    records = []
    for step in range(last + 1):
        records += [{**STEP, "step": step, "time/step_s": step_s}] if step else []
        records += [evaluation(step, success) for at_step, success in points if at_step == step]
    return gsm8k.summarise(records)


async def test_the_closed_loop_counts_the_tokens_of_requests_that_end_in_its_window():
    running = most = 0
    warm = []

    async def ask(prompt, tokens):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return tokens

    load = await closed_loop(
        ask, concurrency=4, warm_s=0.05, measure_s=0.2, prompt=3, lengths=(7, 7), on_warm=lambda: warm.append(running)
    )
    assert most == 4
    assert load.tokens_per_s == pytest.approx(load.requests * 7 / 0.2)
    assert 0 < load.requests <= 4 * 0.2 / 0.01 + 4
    assert warm == [4], "called once, while the load runs"


async def test_the_closed_loop_raises_what_a_request_raises():
    async def ask(prompt, tokens):
        raise RuntimeError("the server is gone")

    with pytest.raises(RuntimeError, match="gone"):
        await closed_loop(ask, concurrency=2, warm_s=0.0, measure_s=0.05)


def test_a_run_is_summarised_over_the_seconds_of_its_steps():
    found = curve((0, 0.3), (1, 0.3), (2, 0.4))
    assert [e["steps_s"] for e in found["evaluations"]] == [0.0, 2.0, 4.0]
    assert [e["wall_s"] for e in found["evaluations"]] == [0.0, 2.0, 9.0], "the evaluation before training counts not"
    assert found["episodes_per_s"] == 5.0
    assert found["sampled_tokens_per_s"] == 50.0
    assert np.isclose(found["trainer_busy"], 0.5)


def test_steps_that_warm_up_are_left_out_of_the_rates_and_not_of_the_curve():
    slow = {**STEP, "time/step_s": 10.0}
    found = gsm8k.summarise([slow, STEP, STEP])
    assert found["episodes_per_s"] < 5
    found = gsm8k.summarise([slow, STEP, STEP], skip=1)
    assert found["episodes_per_s"] == 5.0
    assert found["steps"][-1]["steps_s"] == 14.0


@pytest.mark.parametrize("records", [[], [evaluation(0, 0.3)]])
def test_a_run_without_a_step_is_an_error(records):
    with pytest.raises(RuntimeError, match="made no step"):
        gsm8k.summarise(records)


def test_the_time_to_an_accuracy_lies_between_two_evaluations():
    evaluations = curve((0, 0.2), (10, 0.4), (20, 0.3), (30, 0.5))["evaluations"]
    assert gsm8k.seconds_to(evaluations, 0.3) == pytest.approx(10.0)
    assert gsm8k.seconds_to(evaluations, 0.45) == pytest.approx(55.0), "the dip between is no arrival"
    assert gsm8k.seconds_to(evaluations, 0.6) is None
    assert gsm8k.seconds_to(evaluations, 0.1) == 0.0


def test_a_run_is_held_to_each_aim_in_seconds_or_where_it_never_came_there_in_accuracy():
    found = curve((0, 0.27), (10, 0.37), (20, 0.38), step_s=10.0)
    rows = [row for row in gsm8k.report(found, "run") if row.bound is not None]
    assert {row.name: (row.measured, row.bound, row.holds) for row in rows} == {
        "run: seconds of steps to 37%": (pytest.approx(100.0), 150.0, True),
        "run: most accuracy, where 40% were to come in 420 s": (pytest.approx(38.0), 40.0, False),
    }


def test_two_runs_are_compared_at_equal_samples_and_at_equal_wall_clock():
    fast, slow = curve((0, 0.2), (10, 0.4), (40, 0.5), step_s=1.0), curve((0, 0.2), (10, 0.4), step_s=4.0)
    measured = [row.measured for row in compare(fast, slow)]
    assert measured == pytest.approx([40.0, 40.0, 50.0, 4.0])
    assert at(fast["evaluations"], "step", 5) == pytest.approx(0.3)
    assert at(fast["evaluations"], "step", 99) == 0.5


def test_the_calculator_runs_are_reported_over_their_seeds():
    fast, slow = [curve((0, 0.2), (10, 0.9), step_s=1.0)] * 3, [curve((0, 0.2), (10, 0.9), step_s=3.0)] * 3
    rows = {row.name: row.measured for row in calculator.report({"η = 2": fast, "η = 0": slow})}
    assert rows["η = 2: accuracy after 10 steps, mean"] == pytest.approx(90)
    assert rows["η = 2 at equal wall clock (η = 0's 10 steps), mean"] == pytest.approx(90)
    assert rows["time to η = 0's accuracy after 10 steps, η = 0 over η = 2"] == pytest.approx(3)


def test_calculator_runs_that_ended_early_are_compared_where_all_were_evaluated():
    fast = [curve((0, 0.2), (5, 0.4), (10, 0.9), step_s=1.0)] * 2
    slow = [curve((0, 0.2), (5, 0.5), step_s=3.0), curve((0, 0.2), (5, 0.5), (10, 0.1), step_s=3.0)]
    rows = {row.name: row.measured for row in calculator.report({"η = 2": fast, "η = 0": slow})}
    assert rows["η = 0: accuracy after 5 steps, mean"] == pytest.approx(50)
    assert rows["η = 2 at equal samples (5 steps), mean"] == pytest.approx(40)
    assert rows["η = 2 at equal wall clock (η = 0's 5 steps), mean"] == pytest.approx(90)
    assert rows["time to η = 0's accuracy after 5 steps, η = 0 over η = 2"] == pytest.approx(15 / 6)


@pytest.mark.slow
def test_a_run_that_dies_is_an_error_and_no_short_curve(tmp_path):
    with pytest.raises(RuntimeError, match="died with status"):
        gsm8k.run_command(str(tmp_path / "nowhere.yaml"), tmp_path / "run", [])


@pytest.mark.parametrize(("left", "resumed"), [([], False), (["config.yaml"], True),
                                               (["config.yaml", "summary.json"], False)])  # fmt: skip
def test_a_leg_resumes_a_run_that_has_not_ended_and_begins_anew_where_one_has(left, resumed, tmp_path, monkeypatch):
    commands = []

    class Ended:
        returncode = 0

        def __init__(self, command, **_):
            commands.append(command)
            tmp_path.joinpath("run").mkdir(exist_ok=True)
            tmp_path.joinpath("run", "metrics.jsonl").write_text("")

        def poll(self):
            return 0

        def wait(self, _timeout):
            return 0

    for name in left:
        tmp_path.joinpath("run").mkdir(exist_ok=True)
        tmp_path.joinpath("run", name).touch()
    monkeypatch.setattr(gsm8k.subprocess, "Popen", Ended)
    gsm8k.run_command("x.yaml", tmp_path / "run", [], resume=True)
    assert ("--resume" in commands[0]) == resumed
    assert (tmp_path / "run/config.yaml").exists() == resumed


def test_the_long_tailed_rates_are_compared():
    shares = {"turns_mean": 5.0, "seconds_mean": 2.0, "seconds_cv": 1.0}
    base = {"sampler_busy": 1.0, "trainer_busy": 0.1, "step_s": 1.0, "episodes": shares}
    rows, _ = long_tailed.report({"η = 2": {**base, "episodes_per_s": 30.0}, "η = 0": {**base, "episodes_per_s": 10.0}})
    assert rows[-1].measured == 3.0
    assert rows[-1].holds


def test_the_long_tailed_configuration_is_one_that_runs_take():
    assert RunConfig.model_validate(long_tailed.config("a-model", scale=0.5)).rollout.staleness == 2


def test_turns_and_delays_of_the_slow_service_are_long_tailed_and_bounded():
    rng = random.Random(0)
    turns, delays = [draw_turns(rng) for _ in range(4000)], [draw_delay(rng) for _ in range(4000)]
    assert min(turns) == 1
    assert max(turns) == MAX_TURNS
    assert statistics.pstdev(turns) / statistics.mean(turns) > 0.8
    assert max(delays) <= MAX_DELAY_S
    assert statistics.pstdev(delays) / statistics.mean(delays) > 0.8


async def test_an_episode_with_the_slow_service_has_the_turns_that_its_first_words_draw():
    env = gymnasium.make(
        "benchmarks.gpu.slow_service:benchmarks/SlowService-v0", scale=0.0, disable_env_checker=True
    ).unwrapped
    turns = {}
    for words in ("a", "b", "c", "a"):
        await env.areset(options={"task_id": "train/3"})
        while not env.done:
            await env.astep(words)
        assert 0 < env.reward < 1
        assert turns.setdefault(words, env.turns) == env.turns, "the same words, the same episode"
    assert len(set(turns.values())) > 1
    await env.aclose()


def test_a_batch_of_gsm8ks_shape_fills_one_row():
    samples = gsm8k_like(0, 1000)
    row = pack(samples)
    assert 0.95 * ROW_TOKENS < row.tokens <= ROW_TOKENS
    assert len(split_rows(samples, ROW_TOKENS)) == 1


@pytest.mark.slow
def test_the_kept_results_can_be_drawn_and_no_file_of_results_replaces_what_another_drew(tmp_path):
    files = RESULTS, RESULTS.with_name("h200-2026-12-02.json")
    drawn = {f"{part}_{results.stem}.png" for part in ("gsm8k", "calculator") for results in files}
    for results in files:
        plot.main(results, tmp_path)
    assert {image.name for image in tmp_path.iterdir()} == drawn
    assert drawn <= {image.name for image in (RESULTS.parents[2] / "docs/img").iterdir()}


def test_mps_does_not_run_where_it_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(_mps, "DRIVER", tmp_path)
    assert not _mps.running()
    with pytest.raises(RuntimeError, match="not installed"):
        _mps.start()


def test_what_a_trainers_process_measured_becomes_rows():
    found = {
        "case": "{}",
        "absent, 2 servers busy": {"trainer": 0.0, "sampled": 9.0},
        "alone": {"trainer": 5.0, "sampled": 0.0},
        "2 servers busy": {"trainer": 3.0, "sampled": 7.0},
    }
    assert [(row.name, row.measured) for row in sharing._rows("MPS", found)] == [
        ("MPS: sampled, absent, 2 servers busy", 9.0),
        ("MPS: trainer, alone", 5.0),
        ("MPS: trainer, 2 servers busy", 3.0),
        ("MPS: sampled, 2 servers busy", 7.0),
    ]


async def test_cases_without_their_servers_are_left_out_and_said(monkeypatch, tmp_path):
    servers = tmp_path / "servers"
    servers.mkdir()
    (servers / "kept.json").write_text('{"plain": "http://127.0.0.1:1"}')
    monkeypatch.setenv("SPARRING_BENCH_SERVERS", str(servers))
    asked = []
    figures = {"alone": {"trainer": 5.0, "sampled": 0.0}}
    monkeypatch.setattr(sharing, "_in_own_process", lambda name, case, urls, out: asked.append((name, urls)) or figures)
    rows, details = await sharing._measure(tmp_path, tmp_path)
    assert asked == [("time slices", ["http://127.0.0.1:1"])]
    assert [row.measured for row in rows] == [5.0]
    assert "not kept" in details["MPS"]["skipped"]
