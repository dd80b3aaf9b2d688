"""What every engine keeps, as a class of tests. A test module derives from it and gives the fixtures."""

import asyncio

import pytest

from sparring.backend.engines.base import Engine, SamplingParams
from sparring.errors import EngineError

DEADLINE_S = 30


class EngineContract:
    """Fixtures to give: `make_engine`, which makes a fresh one; `weights`, a source for an update.

    Attributes:
        prompt: any tokens that the engine's model goes on from for long.
        max_length: the context length of the engine.
    """

    prompt = (5, 6, 7, 8)
    max_length = 256

    @pytest.fixture
    async def engine(self, make_engine):
        engine = make_engine()
        await engine.start()
        yield engine
        await engine.stop()

    async def arrived(self, engine: Engine, seen: list[int]) -> None:
        """Returns when all that was sampled before a pause is in `seen`."""
        await engine.health()

    async def test_a_completion_has_a_logprob_and_a_version_for_each_token(self, engine: Engine):
        completion = await engine.generate(self.prompt, SamplingParams(max_new_tokens=7))
        assert len(completion.token_ids) == len(completion.logprobs) == 7
        assert completion.policy_versions == [engine.version] * 7
        assert completion.finish_reason == "length"
        assert all(logprob <= 0 for logprob in completion.logprobs)

    async def test_a_stream_s_chunks_are_the_completion(self, engine: Engine):
        chunks = [chunk async for chunk in engine.stream(self.prompt, SamplingParams(max_new_tokens=6, seed=1))]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert chunks[-1].completion is not None
        assert tokens == chunks[-1].completion.token_ids
        assert all(chunk.completion is None for chunk in chunks[:-1])

    async def test_temperature_zero_repeats(self, engine: Engine):
        greedy = SamplingParams(max_new_tokens=8, temperature=0)
        first, second = await engine.generate(self.prompt, greedy), await engine.generate(self.prompt, greedy)
        assert first.token_ids == second.token_ids

    async def test_a_stop_token_ends_the_completion_and_stays_in_it(self, engine: Engine):
        greedy = SamplingParams(max_new_tokens=8, temperature=0)
        tokens = (await engine.generate(self.prompt, greedy)).token_ids
        stop = SamplingParams(max_new_tokens=8, temperature=0, stop_token_ids=(tokens[3],))
        completion = await engine.generate(self.prompt, stop)
        assert completion.token_ids == tokens[: tokens.index(tokens[3]) + 1]
        assert completion.finish_reason == "stop"

    async def test_alternatives_are_reported_for_each_token(self, engine: Engine):
        completion = await engine.generate(self.prompt, SamplingParams(max_new_tokens=3, temperature=0, top_logprobs=1))
        assert completion.top_logprobs is not None
        assert [[token for token, _ in top] for top in completion.top_logprobs] == [[t] for t in completion.token_ids]

    async def test_greedy_requests_among_sampled_ones_take_the_likeliest_token(self, engine: Engine):
        sampled = SamplingParams(max_new_tokens=60, top_logprobs=1)
        greedy = SamplingParams(max_new_tokens=20, temperature=0, top_logprobs=1)
        wanted = [sampled, greedy, sampled, greedy, sampled]
        found = await asyncio.gather(*(engine.generate(self.prompt, sampling) for sampling in wanted))
        for completion in (found[1], found[3]):
            assert completion.top_logprobs is not None
            assert [top[0][0] for top in completion.top_logprobs] == completion.token_ids

    async def test_a_prompt_beyond_the_context_is_an_error(self, engine: Engine):
        with pytest.raises(EngineError, match=str(self.max_length)):
            await engine.generate(list(self.prompt) * self.max_length, SamplingParams())

    async def test_the_context_bounds_the_completion(self, engine: Engine):
        prompt = (list(self.prompt) * self.max_length)[: self.max_length - 5]
        completion = await engine.generate(prompt, SamplingParams(max_new_tokens=99))
        assert (len(completion.token_ids), completion.finish_reason) == (5, "length")

    async def test_closing_a_stream_aborts_its_request(self, engine: Engine):
        stream = engine.stream(self.prompt, SamplingParams(max_new_tokens=200))
        await anext(stream)
        assert (await engine.health()).running == 1
        await stream.aclose()
        await _settles(engine)

    async def test_cancelling_generate_aborts_its_request(self, engine: Engine):
        task = asyncio.create_task(engine.generate(self.prompt, SamplingParams(max_new_tokens=200)))
        await _settles(engine, running=1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _settles(engine)

    async def test_a_pause_keeps_requests_and_resume_ends_them(self, engine: Engine):
        seen: list[int] = []
        begun = asyncio.Event()

        async def collect() -> None:
            async for chunk in engine.stream(self.prompt, SamplingParams(max_new_tokens=100)):
                seen.extend(chunk.token_ids)
                begun.set()

        request = asyncio.create_task(collect())
        await begun.wait()
        await engine.pause()
        late = asyncio.create_task(engine.generate(self.prompt, SamplingParams(max_new_tokens=2)))
        await self.arrived(engine, seen)
        before = len(seen)
        for _ in range(20):
            await engine.health()
        assert before == len(seen) < 100
        assert not late.done()
        await engine.resume()
        async with asyncio.timeout(DEADLINE_S):
            await request
            assert len((await late).token_ids) == 2
        assert len(seen) == 100

    async def test_an_aborting_pause_ends_requests_with_what_they_have(self, engine: Engine):
        stream = engine.stream(self.prompt, SamplingParams(max_new_tokens=200))
        seen = list((await anext(stream)).token_ids)
        await engine.pause("abort")
        async with asyncio.timeout(DEADLINE_S):
            async for chunk in stream:
                seen += chunk.token_ids
                completion = chunk.completion
        assert completion is not None
        assert completion.finish_reason == "aborted"
        assert completion.token_ids == seen
        late = asyncio.create_task(engine.generate(self.prompt, SamplingParams(max_new_tokens=2)))
        await engine.resume()
        async with asyncio.timeout(DEADLINE_S):
            assert (await late).finish_reason == "length"

    async def test_new_weights_reach_a_request_in_flight(self, engine: Engine, weights):
        old, new = engine.version, engine.version + 1
        stream = engine.stream(self.prompt, SamplingParams(max_new_tokens=60))
        await anext(stream)
        await engine.pause()
        await engine.update_weights(new, weights())
        assert (await engine.health()).version == engine.version == new
        await engine.resume()
        async with asyncio.timeout(DEADLINE_S):
            versions = [chunk.completion async for chunk in stream][-1].policy_versions  # type: ignore[union-attr]
        assert len(versions) == 60
        assert versions == sorted(versions)
        assert set(versions) == {old, new}

    async def test_releasing_an_unknown_session_is_nothing(self, engine: Engine):
        greedy = SamplingParams(max_new_tokens=4, temperature=0)
        before = await engine.generate(self.prompt, greedy, session_id="kept")
        await engine.release("no such session")
        after = await engine.generate(self.prompt, greedy, session_id="kept")
        assert before.token_ids == after.token_ids

    async def test_stopping_fails_what_is_pending_and_all_that_comes_later(self, make_engine):
        engine = make_engine()
        with pytest.raises(EngineError, match="start"):
            await engine.generate(self.prompt, SamplingParams())
        await engine.start()
        await engine.pause()
        pending = asyncio.create_task(engine.generate(self.prompt, SamplingParams(max_new_tokens=200)))
        await asyncio.sleep(0)
        await engine.stop()
        await engine.stop()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(EngineError, match="stopped"):
                await pending
        with pytest.raises(EngineError, match="stopped"):
            await engine.health()


class WeightContract(EngineContract):
    """For engines that know their parameters' names. `weights` gives a list."""

    async def test_weights_of_another_model_are_an_error_and_change_nothing(self, engine: Engine, weights):
        greedy = SamplingParams(max_new_tokens=5, temperature=0)
        version, before = engine.version, await engine.generate(self.prompt, greedy)
        for source in ([*weights(), ("unknown.weight", weights()[0][1])], weights()[1:]):
            with pytest.raises(EngineError, match=r"named_parameters|adapter|lack"):
                await engine.update_weights(version + 1, source)
        after = await engine.generate(self.prompt, greedy)
        assert engine.version == version
        assert (before.token_ids, before.policy_versions) == (after.token_ids, after.policy_versions)


async def _settles(engine: Engine, running: int = 0) -> None:
    """So many requests run, and none waits, soon; that it does not come to this is a failure."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            health = await engine.health()
            if (health.running, health.waiting) == (running, 0):
                return
            await asyncio.sleep(0)
