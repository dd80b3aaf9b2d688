"""The shipped fake keeps the contract, says what it is told, and logs it."""

import asyncio

import pytest
from engine_contract import EngineContract

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.errors import EngineError


class TestScriptedEngineKeepsTheContract(EngineContract):
    @pytest.fixture
    def make_engine(self):
        return lambda: ScriptedEngine(lambda prompt: range(1000), max_length=self.max_length)

    @pytest.fixture
    def weights(self):
        return list


async def test_completions_come_in_order_and_are_logged():
    engine = ScriptedEngine([[1, 2], [3]])
    await engine.start()
    first = await engine.generate([9], SamplingParams(), session_id="a")
    await engine.update_weights(4, [])
    second = await engine.generate([8, 7], SamplingParams())
    assert (first.token_ids, first.finish_reason) == ([1, 2], "stop")
    assert [(c.prompt, c.completion, c.session_id, c.version) for c in engine.log] == [
        ((9,), first, "a", 0),
        ((8, 7), second, None, 4),
    ]
    with pytest.raises(EngineError, match="no completion left"):
        await engine.generate([9], SamplingParams())


async def test_a_function_of_the_prompt_may_be_the_script():
    engine = ScriptedEngine(lambda prompt: [token + 1 for token in prompt])
    await engine.start()
    assert (await engine.generate([4, 5], SamplingParams())).token_ids == [5, 6]


async def test_a_stop_string_ends_it_where_there_is_a_decoder():
    engine = ScriptedEngine([[104, 105, 33, 63]], decode=lambda ids: bytes(ids).decode())
    await engine.start()
    completion = await engine.generate([1], SamplingParams(stop=("i!",)))
    assert (bytes(completion.token_ids), completion.stop_string) == (b"hi!", "i!")


async def test_a_crash_fails_pending_requests():
    engine = ScriptedEngine([[1, 2, 3]])
    await engine.start()
    await engine.pause()
    pending = asyncio.create_task(engine.generate([1], SamplingParams()))
    await asyncio.sleep(0)
    engine.crash("out of memory")
    with pytest.raises(EngineError, match="out of memory"):
        await pending
