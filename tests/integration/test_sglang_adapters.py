"""Adapters beside SGLang's model: each version under a name of its own, compared with the embedded engine's."""

import asyncio
from contextlib import AsyncExitStack

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.fake_sglang import FakeSGLang
from sparring.backend.engines.sglang import SGLangEngine
from sparring.backend.engines.torch_engine import TorchEngine
from sparring.backend.lora import adapted_layers
from sparring.config import LoraConfig
from sparring.errors import EngineError

pytestmark = pytest.mark.slow

LORA = LoraConfig(rank=4, alpha=8, target_modules=["q_proj", "down_proj"])
KNOBS = {"slots": 4, "max_length": 256, "dtype": "float32", "device": "cpu", "lora": LORA}
PROMPT, GREEDY = [5, 6, 7, 8], SamplingParams(max_new_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def adapter(tiny_qwen3):
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3)

    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name in adapted_layers(model, LORA):
            outputs, inputs = model.get_submodule(name).weight.shape
            tensors[f"{name}.lora_A.weight"] = torch.randn(LORA.rank, inputs, generator=generator) * 0.3
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, LORA.rank, generator=generator) * 0.3
        return tensors

    return make


@pytest.fixture
async def served(tiny_qwen3):
    async with AsyncExitStack() as stack:
        fake = FakeSGLang(TorchEngine(tiny_qwen3, **KNOBS), tiny_qwen3)
        url = await stack.enter_async_context(fake.serve())
        engine = SGLangEngine(tiny_qwen3, url=url, max_length=256, lora=LORA)
        await engine.start()
        stack.push_async_callback(engine.stop)
        yield engine, fake


async def expected_of(folder, tensors):
    engine = TorchEngine(folder, **KNOBS)
    await engine.start()
    try:
        if tensors is not None:
            await engine.update_weights(1, list(tensors.items()))
        return await engine.generate(PROMPT, GREEDY)
    finally:
        await engine.stop()


async def test_each_version_is_sampled_with_its_own_adapter(served, tiny_qwen3, adapter):
    engine, fake = served
    for version, tensors in ((0, None), (1, adapter(1)), (2, adapter(2))):
        if tensors is not None:
            await engine.publish(version, tensors.items())
        found, expected = await engine.generate(PROMPT, GREEDY), await expected_of(tiny_qwen3, tensors)
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert set(found.policy_versions) == {version}
        assert (await engine.health()).ok
    assert len(fake._adapters._adapters) == 1, "the server forgets adapters that nobody names"


async def test_a_request_that_lives_through_an_update_has_each_token_s_adapter(served, adapter):
    engine, fake = served
    await engine.publish(1, adapter(1).items())
    fake.bodies.clear()
    begun = asyncio.Event()
    completions = []

    async def ask():
        async for chunk in engine.stream(PROMPT, SamplingParams(max_new_tokens=200)):
            begun.set()
            if chunk.completion is not None:
                completions.append(chunk.completion)

    asking = asyncio.create_task(ask())
    await begun.wait()
    await engine.publish(2, adapter(2).items())
    await asking
    versions = completions[0].policy_versions
    assert len(versions) == 200
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}
    first, second = fake.bodies
    assert len(second["input_ids"]) == len(PROMPT) + versions.count(1)
    assert first["lora_path"].endswith("-1")
    assert second["lora_path"].endswith("-2")
    assert first["extra_key"] != second["extra_key"]


async def test_the_pause_holds_no_copy(served, adapter):
    """All of it is with the server before the pause; loading is a name."""
    engine, _ = served
    staged = await engine.stage_weights(1, adapter(1).items())
    models = await engine._transport.get("/v1/models", deadline_s=10)
    assert any(model["id"].endswith("-1") for model in models["data"])
    await engine.pause()
    await engine.update_weights(1, staged)
    await engine.resume()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.layers.0.self_attn.q_proj.lora_B.weight"), r"layers\.0\.self_attn\.q_proj has"),
        (lambda t: t.update({"stranger.lora_A.weight": torch.zeros(4, 8)}), "stranger has matrices"),
        (lambda t: t.clear(), "no tensor at all"),
    ],
    ids=["half", "unknown", "empty"],
)
async def test_tensors_that_are_no_adapter_of_the_model_are_refused(served, adapter, change, said):
    engine, _ = served
    tensors = adapter(1)
    change(tensors)
    with pytest.raises(EngineError, match=said):
        await engine.stage_weights(1, tensors.items())


async def test_a_server_without_adapters_says_so(tiny_qwen3, adapter):
    knobs = {**KNOBS, "lora": None}
    async with FakeSGLang(TorchEngine(tiny_qwen3, **knobs), tiny_qwen3).serve() as url:
        engine = SGLangEngine(tiny_qwen3, url=url, max_length=256, lora=LORA)
        await engine.start()
        with pytest.raises(EngineError, match="--enable-lora"):
            await engine.stage_weights(1, adapter(1).items())
        await engine.stop()


async def test_a_server_that_was_restarted_is_no_longer_well(served, adapter):
    engine, fake = served
    await engine.publish(1, adapter(1).items())
    fake._adapters._adapters.clear()
    health = await engine.health()
    assert not health.ok
    assert "was it restarted?" in health.detail
