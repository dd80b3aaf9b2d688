"""What the GPU benchmarks compute from what they see; the rest of them needs a GPU."""

import asyncio

import numpy as np
import pytest

from benchmarks.gpu import gsm8k
from benchmarks.gpu._load import closed_loop


async def test_the_closed_loop_counts_the_tokens_of_requests_that_end_in_its_window():
    running = most = 0

    async def ask(prompt, tokens):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return tokens

    load = await closed_loop(ask, concurrency=4, warm_s=0.05, measure_s=0.2, prompt=3, lengths=(7, 7))
    assert most == 4
    assert load.tokens_per_s == pytest.approx(load.requests * 7 / 0.2)
    assert 0 < load.requests <= 4 * 0.2 / 0.01 + 4


async def test_the_closed_loop_raises_what_a_request_raises():
    async def ask(prompt, tokens):
        raise RuntimeError("the server is gone")

    with pytest.raises(RuntimeError, match="gone"):
        await closed_loop(ask, concurrency=2, warm_s=0.0, measure_s=0.05)


def test_a_run_is_summarised_over_the_seconds_of_its_steps():
    step = {"kind": "step", "time/step_s": 2.0, "episodes": 10, "sampler/tokens": 100, "trainer/busy": 0.5}
    evaluation = {"kind": "evaluation", "success": 0.3}
    found = gsm8k.summarise([{**evaluation, "step": 0}, step, step, {**evaluation, "step": 2}])
    assert [e["steps_s"] for e in found["evaluations"]] == [0.0, 4.0]
    assert found["episodes_per_s"] == 5.0
    assert found["sampled_tokens_per_s"] == 50.0
    assert np.isclose(found["trainer_busy"], 0.5)


def test_a_run_without_a_step_is_an_error():
    with pytest.raises(RuntimeError, match="made no step"):
        gsm8k.summarise([])
