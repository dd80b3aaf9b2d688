"""The embedded engine on a real model: it answers, and repeats bit for bit at full width."""

import asyncio
import random

import pytest

from sparring.backend.engines.base import Completion, SamplingParams
from sparring.backend.engines.torch_engine import TorchEngine

pytestmark = [pytest.mark.model, pytest.mark.slow]


async def test_it_knows_the_capital_of_france(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    engine = TorchEngine(smollm2, slots=4, max_length=256, device="cpu")
    await engine.start()
    try:
        sampling = SamplingParams(max_new_tokens=32, temperature=0, stop=("Paris",))
        completion = await engine.generate(prompt, sampling)
    finally:
        await engine.stop()
    assert completion.stop_string == "Paris"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_deterministic_at_full_width(smollm2, dtype):
    rng = random.Random(0)
    prefix = [rng.randrange(49_000) for _ in range(70)]
    requests = [
        ([*prefix, *(rng.randrange(49_000) for _ in range(rng.randint(0, 9)))], rng.randint(2, 8)) for _ in range(12)
    ]

    async def play(order: list[int]) -> dict[int, Completion]:
        engine = TorchEngine(smollm2, slots=32, max_length=128, dtype=dtype, device="cpu", deterministic=True)
        await engine.start()
        try:
            tasks = {
                number: asyncio.create_task(
                    engine.generate(
                        requests[number][0], SamplingParams(max_new_tokens=requests[number][1], seed=number)
                    )
                )
                for number in order
            }
            return {number: await task for number, task in tasks.items()}
        finally:
            await engine.stop()

    expected = await play(list(range(12)))
    assert await play(rng.sample(range(12), 12)) == expected
    assert await play([3, 8]) == {number: expected[number] for number in (3, 8)}
