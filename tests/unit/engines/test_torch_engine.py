"""The embedded engine against full forward passes of tiny random models."""

import asyncio
import random

import pytest
import torch
from engine_contract import WeightContract

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.torch_engine import TorchEngine
from sparring.errors import EngineError

ARCHITECTURES = ["llama", "qwen2", "qwen3"]


@pytest.fixture
async def start():
    """Makes engines that stop with the test."""
    engines = []

    async def make(model, *, slots=4, max_length=128, dtype="float32", **options) -> TorchEngine:
        engine = TorchEngine(model, slots=slots, max_length=max_length, dtype=dtype, device="cpu", **options)
        engines.append(engine)
        await engine.start()
        return engine

    yield make
    for engine in engines:
        await engine.stop()


class TestTorchEngineKeepsTheContract(WeightContract):
    @pytest.fixture
    def make_engine(self, make_model):
        return lambda: TorchEngine(make_model(), slots=4, max_length=self.max_length, dtype="float32", device="cpu")

    @pytest.fixture
    def weights(self, make_model):
        return lambda: list(make_model(seed=1).named_parameters())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("seed", [0, 1])
async def test_random_joins_and_leaves_match_a_full_forward(start, make_model, full_forward, architecture, seed):
    model = make_model(architecture, tied=architecture != "qwen3")
    engine = await start(model, slots=3, kept_sessions=2)
    rng = random.Random(seed)
    prompts = [[rng.randrange(96) for _ in range(rng.randint(1, 40))] for _ in range(3)]

    async def episode(number: int) -> None:
        prompt = prompts[number % 3] + [rng.randrange(96) for _ in range(rng.choice([0, 0, 1, 5]))]
        for _ in range(2):
            sampling = SamplingParams(max_new_tokens=rng.randint(1, 12), temperature=0.8, seed=number)
            completion = await engine.generate(prompt, sampling, session_id=f"episode {number}")
            expected = full_forward({0: model}, prompt, completion, temperature=0.8)
            assert completion.logprobs == pytest.approx(expected, abs=2e-5)
            prompt = prompt + completion.token_ids + [rng.randrange(96) for _ in range(rng.randint(0, 9))]

    await asyncio.gather(*(episode(number) for number in range(10)))
    stats = await engine.stats()
    assert stats["prefill_reused"] > 0
    assert stats["occupancy"] > 1  # some of them decoded together


async def test_the_prompt_of_a_group_is_computed_once(start, make_model, full_forward):
    model = make_model()
    engine = await start(model, slots=8)
    prompt = list(range(50))
    await engine.pause()
    members = [asyncio.create_task(engine.generate(prompt, SamplingParams(max_new_tokens=4))) for _ in range(8)]
    await asyncio.sleep(0)
    await engine.resume()
    for completion in await asyncio.gather(*members):
        assert completion.logprobs == pytest.approx(full_forward({0: model}, prompt, completion), abs=2e-5)
    stats = await engine.stats()
    assert stats["prefill_computed"] == 50 + 7
    assert stats["prefill_reused"] == 7 * 49


async def test_a_next_turn_computes_the_new_tokens_and_the_last_sampled_one(start, make_model, full_forward):
    model = make_model()
    engine = await start(model)
    prompt = list(range(20))
    first = await engine.generate(prompt, SamplingParams(max_new_tokens=6), session_id="a")
    await engine.generate([95] * 20, SamplingParams(max_new_tokens=6))
    before = await engine.stats()
    longer = [*prompt, *first.token_ids, 1, 2, 3]
    second = await engine.generate(longer, SamplingParams(max_new_tokens=6), session_id="a")
    after = await engine.stats()
    assert after["prefill_computed"] - before["prefill_computed"] == 1 + 3
    assert second.logprobs == pytest.approx(full_forward({0: model}, longer, second), abs=2e-5)


async def test_a_rewritten_history_is_computed_from_where_it_differs(start, make_model, full_forward):
    model = make_model()
    engine = await start(model)
    await engine.generate(list(range(20)), SamplingParams(max_new_tokens=6), session_id="a")
    rewritten = [*range(10), *range(50, 60)]
    completion = await engine.generate(rewritten, SamplingParams(max_new_tokens=6), session_id="a")
    assert completion.logprobs == pytest.approx(full_forward({0: model}, rewritten, completion), abs=2e-5)
    assert (await engine.stats())["prefill_reused"] == 10


async def test_idle_sessions_make_room_the_longest_idle_first(start, make_model):
    engine = await start(make_model(), slots=1, kept_sessions=1)
    one = SamplingParams(max_new_tokens=1)
    for session, token in (("a", 1), ("b", 2), ("c", 3)):
        await engine.generate([token] * 20, one, session_id=session)
    assert (await engine.stats())["evictions"] == 1
    before = (await engine.stats())["prefill_reused"]
    await engine.generate([2] * 21, one, session_id="b")  # kept
    assert (await engine.stats())["prefill_reused"] == before + 20
    await engine.generate([1] * 21, one, session_id="a")  # evicted
    assert (await engine.stats())["prefill_reused"] == before + 20


async def test_a_released_session_makes_room_without_eviction(start, make_model):
    engine = await start(make_model(), slots=1, kept_sessions=0)
    await engine.generate([1] * 20, SamplingParams(max_new_tokens=1), session_id="a")
    await engine.release("a")
    await engine.generate([2] * 20, SamplingParams(max_new_tokens=1), session_id="b")
    assert (await engine.stats())["evictions"] == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_each_token_is_scored_under_the_version_recorded_for_it(start, make_model, full_forward, architecture):
    models = {version: make_model(architecture, seed=version) for version in range(4)}
    engine = await start(models[0])
    prompt = list(range(30))

    async def swap_at(tokens: int):
        stream = engine.stream(prompt, SamplingParams(max_new_tokens=40, seed=tokens))
        seen = 0
        async for chunk in stream:
            seen += len(chunk.token_ids)
            if seen % tokens == 0 and engine.version < 3 and not updating.locked():
                async with updating:
                    version = engine.version + 1
                    await engine.update_weights(version, models[version].named_parameters())
        return chunk.completion

    updating = asyncio.Lock()
    completions = await asyncio.gather(swap_at(5), swap_at(7))
    assert {version for completion in completions for version in completion.policy_versions} == {0, 1, 2, 3}
    for completion in completions:
        assert completion.logprobs == pytest.approx(full_forward(models, prompt, completion), abs=2e-5)


@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_every_completion_of_a_storm_matches_a_full_forward(start, make_model, full_forward, seed):
    """Joins, next turns, cancels, pauses and updates at random moments, with too few slots for all of it."""
    rng = random.Random(seed)
    models = {version: make_model(seed=version) for version in range(4)}
    engine = await start(models[0], slots=3, kept_sessions=1)
    shared = [rng.randrange(96) for _ in range(25)]
    checked = 0

    async def episode(number: int) -> None:
        nonlocal checked
        prompt = shared[: rng.randint(1, 25)] + [rng.randrange(96) for _ in range(rng.randint(0, 3))]
        for _ in range(3):
            request = asyncio.ensure_future(
                engine.generate(prompt, SamplingParams(max_new_tokens=rng.randint(1, 9)), session_id=str(number))
            )
            if rng.random() < 0.2:
                for _ in range(rng.randint(1, 4)):
                    await engine.health()
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)
                continue
            completion = await request
            assert completion.logprobs == pytest.approx(full_forward(models, prompt, completion), abs=3e-5)
            checked += 1
            prompt = prompt + completion.token_ids + [rng.randrange(96)]
        await engine.release(str(number))

    async def updates() -> None:
        for version in (1, 2, 3):
            for _ in range(rng.randint(3, 12)):
                await engine.health()
            await engine.pause()
            await engine.update_weights(version, models[version].named_parameters())
            await engine.resume()

    await asyncio.gather(updates(), *(episode(number) for number in range(12)))
    health = await engine.health()
    assert (health.running, health.waiting) == (0, 0)
    assert checked > 15


async def test_old_keys_serve_no_new_request(start, make_model, full_forward):
    models = {version: make_model(seed=version) for version in range(2)}
    engine = await start(models[0])
    prompt = list(range(30))
    first = await engine.generate(prompt, SamplingParams(max_new_tokens=4), session_id="a")
    await engine.update_weights(1, models[1].named_parameters())
    longer = [*prompt, *first.token_ids, 7]
    second, other = await asyncio.gather(
        engine.generate(longer, SamplingParams(max_new_tokens=4), session_id="a"),
        engine.generate(prompt, SamplingParams(max_new_tokens=4)),
    )
    assert second.logprobs == pytest.approx(full_forward(models, longer, second), abs=2e-5)
    assert other.logprobs == pytest.approx(full_forward(models, prompt, other), abs=2e-5)


async def test_a_tied_head_may_be_given_too_and_an_untied_one_must(start, make_model):
    tied, untied = await start(make_model()), await start(make_model(tied=False))
    source = dict(make_model(seed=1, tied=False).named_parameters())
    await untied.update_weights(1, source.items())
    await tied.update_weights(1, source.items())
    del source["lm_head.weight"]
    await tied.update_weights(2, source.items())
    with pytest.raises(EngineError, match="lm_head"):
        await untied.update_weights(2, source.items())


async def test_weights_may_come_from_a_folder(start, make_model, full_forward, tmp_path):
    other = make_model(seed=1)
    other.save_pretrained(tmp_path)
    engine = await start(make_model())
    await engine.update_weights(5, tmp_path)
    completion = await engine.generate([1, 2, 3], SamplingParams(max_new_tokens=5))
    assert completion.policy_versions == [5] * 5
    assert completion.logprobs == pytest.approx(full_forward({5: other}, [1, 2, 3], completion), abs=2e-5)


async def test_a_stop_string_may_lie_across_tokens(start, make_model, characters):
    engine = await start(make_model(), tokenizer=characters)
    tokens = (await engine.generate([1, 2], SamplingParams(max_new_tokens=20, temperature=0))).token_ids
    text = characters.decode(tokens)
    stop = text[4:7]
    sampling = SamplingParams(max_new_tokens=20, temperature=0, stop=("\x7f never", stop))
    completion = await engine.generate([1, 2], sampling)
    assert completion.token_ids == tokens[: text.index(stop) + 3]
    assert (completion.finish_reason, completion.stop_string) == ("stop", stop)


async def test_stop_strings_without_a_tokenizer_are_an_error(start, make_model):
    engine = await start(make_model())
    with pytest.raises(EngineError, match="tokenizer"):
        await engine.generate([1], SamplingParams(stop=("x",)))


@pytest.mark.parametrize("prompt", [[], [96], [-1]])
async def test_a_prompt_that_is_none_is_an_error(start, make_model, prompt):
    engine = await start(make_model())
    with pytest.raises(EngineError, match="token"):
        await engine.generate(prompt, SamplingParams())


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": 0}, {"max_new_tokens": 0}, {"stop": ("",)}])
async def test_sampling_that_means_nothing_is_an_error(start, make_model, characters, wrong):
    engine = await start(make_model(), tokenizer=characters)
    with pytest.raises(EngineError, match="sampling needs"):
        await engine.generate([1], SamplingParams(**wrong))


async def test_an_engine_starts_again_after_a_stop(start, make_model):
    engine = await start(make_model())
    await engine.update_weights(7, make_model(seed=1).named_parameters())
    await engine.stop()
    await engine.start()
    assert (await engine.generate([1], SamplingParams(max_new_tokens=1))).policy_versions == [0]


async def test_weights_that_are_not_finite_fail_requests_and_good_ones_repair_it(start, make_model, full_forward):
    model = make_model()
    engine = await start(model)
    broken = [(name, torch.full_like(p, torch.nan)) for name, p in model.named_parameters()]
    await engine.update_weights(1, broken)
    with pytest.raises(EngineError, match=r"version 1 .* not finite"):
        await engine.generate([1, 2, 3], SamplingParams(max_new_tokens=5))
    await engine.update_weights(2, model.named_parameters())
    completion = await engine.generate([1, 2, 3], SamplingParams(max_new_tokens=5))
    assert completion.logprobs == pytest.approx(full_forward({2: model}, [1, 2, 3], completion), abs=2e-5)


async def test_a_long_prompt_goes_through_in_pieces(start, make_model, full_forward, monkeypatch):
    monkeypatch.setattr("sparring.backend.engines.scheduler._PREFILL_TOKENS", 16)
    model = make_model()
    engine = await start(model)
    prompts = [[seed, *range(60)] for seed in range(3)]
    completions = await asyncio.gather(*(engine.generate(p, SamplingParams(max_new_tokens=5)) for p in prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.logprobs == pytest.approx(full_forward({0: model}, prompt, completion), abs=2e-5)


async def test_weights_whose_source_fails_change_nothing(start, make_model):
    def source():
        yield from list(make_model(seed=1).named_parameters())[:3]
        raise OSError("the disk is gone")

    engine = await start(make_model())
    with pytest.raises(EngineError, match="the disk is gone"):
        await engine.update_weights(1, source())
    assert (await engine.generate([1], SamplingParams(max_new_tokens=1))).policy_versions == [0]


async def test_bfloat16_stays_near_float32(start, make_model, full_forward):
    model = make_model()
    engine = await start(model, dtype="bfloat16")
    completion = await engine.generate(list(range(20)), SamplingParams(max_new_tokens=30, seed=0))
    expected = full_forward({0: model}, list(range(20)), completion)
    assert sum(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)) / 30 < 0.1
