"""`deterministic`: what a request gets depends on the weights, its prompt and its sampling alone, bit for bit."""

import asyncio
import random

import pytest

from sparring.backend.engines.base import Completion, SamplingParams
from sparring.backend.engines.torch_engine import TorchEngine

REQUESTS = [
    ([*range(40), *([] if number % 2 else [7, 8, 9])], SamplingParams(max_new_tokens=4 + number, seed=number))
    for number in range(7)
]


async def play(model, order, *, dtype="float32", others=0, sessions=False, slots=4) -> dict[int, Completion]:
    """The requests in some order, each next to whatever else runs then."""
    engine = TorchEngine(model, slots=slots, max_length=96, dtype=dtype, device="cpu", deterministic=True)
    await engine.start()
    try:
        noise = [
            asyncio.create_task(engine.generate([90 - number] * 35, SamplingParams(max_new_tokens=50)))
            for number in range(others)
        ]
        tasks = {}
        for number in order:
            prompt, sampling = REQUESTS[number]
            session = f"session {number}" if sessions else None
            tasks[number] = asyncio.create_task(engine.generate(prompt, sampling, session_id=session))
            for _ in range(number % 3):
                await asyncio.sleep(0)
        await asyncio.gather(*noise)
        return {number: await task for number, task in tasks.items()}
    finally:
        await engine.stop()


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_order_neighbours_and_sessions_change_no_bit(make_model, architecture, dtype):
    model = make_model(architecture)
    expected = await play(model, range(7), dtype=dtype)
    shuffled = random.Random(0).sample(range(7), 7)
    assert await play(model, shuffled, dtype=dtype) == expected
    assert await play(model, [6, 5], dtype=dtype) == {number: expected[number] for number in (6, 5)}
    assert await play(model, shuffled, dtype=dtype, others=3, sessions=True) == expected


async def test_a_second_turn_repeats_whether_or_not_its_session_was_kept(make_model):
    async def two_turns(session: str | None, between: int) -> Completion:
        engine = TorchEngine(make_model(), slots=2, max_length=96, dtype="float32", device="cpu", deterministic=True)
        await engine.start()
        prompt = list(range(45))
        # The first turn ends behind the next whole chunk: the keys of what was decoded are of other passes.
        first = await engine.generate(prompt, SamplingParams(max_new_tokens=25, seed=1), session_id=session)
        for number in range(between):
            await engine.generate([number] * 40, SamplingParams(max_new_tokens=1), session_id=f"other {number}")
        longer = [*prompt, *first.token_ids, 3]
        second = await engine.generate(longer, SamplingParams(max_new_tokens=9, seed=2), session_id=session)
        await engine.stop()
        return second

    assert await two_turns("a", 0) == await two_turns("a", 9) == await two_turns(None, 3)


async def test_prompts_beyond_what_a_pass_takes_are_cut_where_they_are_cut_alone(make_model):
    prompts = [[i, *range(30 + i % 7)] for i in range(50)]

    async def play(numbers) -> list[Completion]:
        engine = TorchEngine(make_model(), slots=50, max_length=96, dtype="float32", device="cpu", deterministic=True)
        await engine.start()
        sampling = SamplingParams(max_new_tokens=2, seed=1)
        got = await asyncio.gather(*(engine.generate(prompts[i], sampling) for i in numbers))
        await engine.stop()
        return got

    together = await play(range(50))
    assert await play(range(30, 40)) == together[30:40]


async def test_a_seed_that_is_not_given_comes_from_session_and_prompt(make_model):
    async def play(session: str, seed: int, warm_up: int) -> Completion:
        engine = TorchEngine(
            make_model(), slots=2, max_length=96, dtype="float32", device="cpu", deterministic=True, seed=seed
        )
        await engine.start()
        for _ in range(warm_up):
            await engine.generate([1], SamplingParams(max_new_tokens=1))
        completion = await engine.generate([1, 2, 3], SamplingParams(max_new_tokens=20), session_id=session)
        await engine.stop()
        return completion

    expected = await play("a", 0, 0)
    assert await play("a", 0, 3) == expected
    assert await play("b", 0, 0) != expected
    assert await play("a", 1, 0) != expected
