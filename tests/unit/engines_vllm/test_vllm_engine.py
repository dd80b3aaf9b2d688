"""What a vLLM server may lack, or refuse, over HTTP."""

import pytest

from sparring.backend.engines.fake_server import FakeServer
from sparring.backend.engines.fake_vllm import FakeVLLM
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.engines.vllm import VLLMEngine
from sparring.errors import EngineError


def count(prompt):
    return range(prompt[-1] + 1, 10**6)


async def test_a_server_that_cannot_load_says_so_and_the_version_stays(tiny_qwen3, tmp_path):
    class Refusing(ScriptedEngine):
        async def update_weights(self, version, source):
            raise EngineError("the disk is gone")

    async with FakeVLLM(Refusing(count), tiny_qwen3).serve() as url:
        engine = VLLMEngine(tiny_qwen3, url=url, max_length=100)
        await engine.start()
        with pytest.raises(EngineError, match=r"refused /collective_rpc: the disk is gone; .* restart it"):
            await engine.update_weights(1, tiny_qwen3)
        assert (engine.version, (await engine.health()).ok) == (0, True)
        await engine.stop()


class TestWhatAnswersAtTheAddress:
    """Each is said as the engine starts, with what to do about it."""

    async def refused(self, model, fake, key=None, max_length=100):
        async with fake.serve() as url:
            engine = VLLMEngine(model, url=url, key=key, max_length=max_length)
            with pytest.raises(EngineError) as error:
                await engine.start()
            return str(error.value)

    async def test_another_program(self, tiny_qwen3):
        said = await self.refused(tiny_qwen3, FakeServer(ScriptedEngine(count), tiny_qwen3, "knows no path at all"))
        assert "is not a vLLM server" in said
        assert "check the port" in said

    async def test_a_server_that_wants_a_key(self, tiny_qwen3):
        said = await self.refused(tiny_qwen3, FakeVLLM(ScriptedEngine(count), tiny_qwen3, key="right"))
        assert "wants an API key: set SPARRING_ENGINE_KEY" in said

    async def test_a_server_with_another_key_which_is_not_told(self, tiny_qwen3):
        said = await self.refused(tiny_qwen3, FakeVLLM(ScriptedEngine(count), tiny_qwen3, key="right"), key="wrong")
        assert "wants another API key than ours" in said
        assert "wrong" not in said

    async def test_a_server_without_its_development_mode(self, tiny_qwen3):
        said = await self.refused(tiny_qwen3, FakeVLLM(ScriptedEngine(count), tiny_qwen3, development=False))
        assert "VLLM_SERVER_DEV_MODE=1" in said

    async def test_a_server_whose_logprobs_are_of_another_distribution(self, tiny_qwen3):
        said = await self.refused(tiny_qwen3, FakeVLLM(ScriptedEngine(count), tiny_qwen3, processed_logprobs=False))
        assert "--logprobs-mode processed_logprobs" in said

    async def test_a_server_with_less_context(self, tiny_qwen3):
        said = await self.refused(tiny_qwen3, FakeVLLM(ScriptedEngine(count), tiny_qwen3, max_length=64))
        assert "a context of 64 tokens, less than model.max_length=100" in said
