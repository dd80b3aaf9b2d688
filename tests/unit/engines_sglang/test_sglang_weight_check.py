"""After an update the server is asked whether it holds what was sent. The stand-in passes over a tensor in silence."""

import asyncio
import logging

import pytest
from safetensors.torch import load_file

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.fake_sglang import FakeSGLang
from sparring.backend.engines.remote.pool import EnginePool
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.engines.sglang import SGLangEngine
from sparring.backend.engines.sglang.options import WeightOptions
from sparring.errors import EngineError

LOST = "model.layers.1.mlp.down_proj.weight"


class Lossy(FakeSGLang):
    """Keeps the old values of one parameter, and says that all went well."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        take = self.weights.take

        async def lossy(named, version):
            await take({name: tensor for name, tensor in named.items() if name != LOST}, version)

        self.weights.take = lossy


@pytest.fixture
def tensors(tiny_qwen3):
    return {name: tensor + 1 for name, tensor in load_file(tiny_qwen3 / "model.safetensors").items()}


@pytest.fixture
def served(tiny_qwen3):
    """Engines over stand-ins, one for each kind given."""

    async def make(stack, *kinds, options=None, **more):
        engines = []
        for kind in kinds:
            inner = ScriptedEngine(lambda prompt: range(prompt[-1] + 1, 10**6))
            url = await stack.enter_async_context(kind(inner, tiny_qwen3, **more).serve())
            options = options or WeightOptions(route="ipc")
            engine = SGLangEngine(tiny_qwen3, url=url, max_length=1000, weights=options)
            await engine.start()
            stack.push_async_callback(engine.stop)
            engines.append(engine)
        return engines

    return make


@pytest.fixture
async def stack():
    from contextlib import AsyncExitStack

    async with AsyncExitStack() as stack:
        yield stack


@pytest.mark.parametrize("route", ["ipc", "disk"])
async def test_what_was_sent_and_arrived_passes(stack, served, tensors, route, caplog):
    (engine,) = await served(stack, FakeSGLang, options=WeightOptions(route=route))
    with caplog.at_level(logging.WARNING):
        await engine.publish(1, tensors.items())
    assert engine._loader is not None
    assert caplog.records == []


async def test_a_folder_that_was_given_is_verified_too(stack, served, tiny_qwen3):
    (engine,) = await served(stack, FakeSGLang)
    await engine.publish(1, tiny_qwen3)
    assert engine.version == 1


async def test_a_parameter_that_was_lost_is_named_and_nothing_more_is_sampled(stack, served, tensors):
    (engine,) = await served(stack, Lossy)
    with pytest.raises(EngineError, match=rf"server at {engine.url} does not hold.*{LOST}") as refusal:
        await engine.publish(1, tensors.items())
    with pytest.raises(EngineError) as later:
        await engine.generate([1], SamplingParams(max_new_tokens=1))
    assert str(later.value) == str(refusal.value)


async def test_in_a_pool_the_others_go_on(stack, served, tensors):
    pool = EnginePool(await served(stack, FakeSGLang, Lossy))
    for version in (1, 2):
        staged = await pool.stage_weights(version, tensors.items())
        await pool.pause()
        await pool.update_weights(version, staged)
        await pool.resume()
        await pool.verify_weights()
    assert pool.version == 2
    health = await pool.health()
    assert health.ok
    assert LOST in health.detail
    completions = await asyncio.gather(*(pool.generate([n], SamplingParams(max_new_tokens=2)) for n in range(8)))
    assert {version for completion in completions for version in completion.policy_versions} == {2}


async def test_a_server_that_cannot_tell_is_said_once(stack, served, tensors, caplog):
    (engine,) = await served(stack, Lossy, reports_versions=False)
    with caplog.at_level(logging.WARNING):
        await engine.publish(1, tensors.items())
        await engine.publish(2, tensors.items())
    assert [record.getMessage().count("not verified") for record in caplog.records] == [1]


@pytest.mark.parametrize("every", [1, 2, 0])
async def test_it_is_asked_after_every_so_many_updates(stack, served, tensors, every):
    (engine,) = await served(stack, FakeSGLang, options=WeightOptions(route="ipc", verify_every=every))
    asked = []
    assert engine._loader is not None
    post = engine._transport.post

    async def watched(path, body, *, deadline_s):
        if path == "/weights_checker":
            asked.append(engine.version)
        return await post(path, body, deadline_s=deadline_s)

    engine._transport.post = watched
    for version in range(1, 5):
        await engine.publish(version, tensors.items())
    assert asked == {1: [1, 2, 3, 4], 2: [1, 3], 0: []}[every]
