"""Answers checked in processes that can be killed, with the real math-verify."""

import asyncio
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sparring.agents.runner import make_runner
from sparring.agents.scripted import ScriptedPolicy
from sparring.envs import math_check, math_worker
from sparring.envs.gsm8k import GSM8K
from sparring.envs.hermes import message_text
from sparring.envs.loop import spawn
from sparring.envs.math_check import answers_equal
from sparring.errors import TaskError
from sparring.types import EpisodeSpec

pytestmark = pytest.mark.slow
HANGS = "9^{9^{9^{9}}}"


async def start_hanging_check():
    checking = asyncio.create_task(answers_equal("18", HANGS, timeout_s=30))
    async with asyncio.timeout(20):
        while math_check._pool().busy == 0:  # noqa: ASYNC110  # the pool lives on another loop
            await asyncio.sleep(0.001)
    return checking


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("18", "18", True),
        ("18", "18.0", True),
        ("18", "\\frac{36}{2}", True),
        ("0.5", "\\frac12", True),
        ("1200", "1{,}200", True),
        ("18", "17", False),
        ("18", "-18", False),
        ("18", "x", False),
        ("18", "", False),
        ("18", "\\undefined{", False),
        ("18", "1" * 100_000, False),
    ],
)
async def test_values_are_compared(gold, answer, equal):
    assert await answers_equal(gold, answer) is equal


@settings(max_examples=200, deadline=None)
@given(*[st.from_regex(math_check._PLAIN, fullmatch=True)] * 2, st.booleans())
def test_plain_numbers_are_equal_where_math_verify_has_them_so(gold, other, same):
    answer = gold + ("0" if "." in gold else ".0") if same else other
    assume(math_check._PLAIN.fullmatch(answer) and gold != answer)
    verdict = asyncio.run(answers_equal(gold, answer))
    assert verdict == math_worker._equal(gold, answer)


async def test_plain_numbers_need_no_process(monkeypatch):
    monkeypatch.setattr(math_check, "_pool", None)
    assert await answers_equal("18", "18.0")
    assert not await answers_equal("18", "17")


async def test_a_check_that_hangs_is_an_error_and_the_next_one_works():
    start = time.perf_counter()
    with pytest.raises(TaskError, match="hung for 1 s"):
        await answers_equal("18", HANGS, timeout_s=1)
    assert time.perf_counter() - start < 20
    assert await answers_equal("18", "36/2")


async def test_a_worker_that_is_killed_is_an_error_and_the_next_one_works():
    assert await answers_equal("18", "36/2")
    checking = await start_hanging_check()
    for worker in list(math_check._pool().workers):
        worker.kill()
    with pytest.raises(TaskError, match="broke its process"):
        await checking
    assert await answers_equal("18", "36/2")


async def test_many_checks_at_once_share_the_workers():
    answers = await asyncio.gather(*(answers_equal("18", f"{n}+0") for n in range(40)))
    assert [n for n, equal in enumerate(answers) if equal] == [18]
    assert len(math_check._pool().workers) <= math_check._WORKERS


async def test_a_cancelled_check_leaves_no_busy_worker_behind():
    checking = await start_hanging_check()
    checking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await checking
    assert await answers_equal("18", "36/2", timeout_s=10)


async def test_a_worker_that_died_while_idle_is_replaced_without_a_failure():
    assert await answers_equal("18", "36/2")
    for worker in list(math_check._pool().workers):
        worker.kill()
        await asyncio.wrap_future(spawn(worker.wait()))
    assert await answers_equal("18", "36/2")


async def test_a_hung_check_is_a_failed_episode_and_never_a_reward_of_zero(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "Why?", "answer": "#### 18"}\n')
    env_kwargs = {"path": str(tmp_path), "check_timeout_s": 1.0}
    spec = EpisodeSpec("e", "g", "sparring/GSM8K-v0", "train/0", seed=0)
    run = make_runner("sparring/GSM8K-v0", env_kwargs, ScriptedPolicy([f"\\boxed{{{HANGS}}}"]), timeout_s=30)
    result = await run(spec, None)
    assert (result.reward, result.failure.kind) == (None, "task")
    assert "hung" in result.failure.message


@pytest.mark.data
async def test_every_problem_of_the_real_data_is_read_and_its_solution_is_right(sparring_data):
    env = GSM8K(path=sparring_data / "gsm8k")
    assert [len(env.task_ids(split)) for split in ("train", "test")] == [7473, 1319]
    for split in ("train", "test"):
        for task_id in env.task_ids(split):
            await env.areset(options={"task_id": task_id})
            await env.astep(message_text(env.demonstration()[0]))
            assert env.reward == 1.0, task_id
