"""The vLLM engine over HTTP, against a server whose tokens are scripted."""

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.fake_server import FakeServer
from sparring.backend.engines.fake_vllm import FakeVLLM
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.engines.vllm import VLLMEngine
from sparring.errors import EngineError


def count(prompt):
    """Goes on counting, so a cut request shows."""
    return range(prompt[-1] + 1, 10**6)


async def until(condition) -> None:
    """Wait for something that the server's side brings about."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # the scripted engine has no event to wait for
            await asyncio.sleep(0.002)


async def test_a_completion_has_the_tokens_logprobs_and_versions_of_the_server(scripted_vllm):
    async with scripted_vllm(count) as (engine, _inner, fake):
        completion = await engine.generate([1, 2], SamplingParams(max_new_tokens=3))
    assert completion.token_ids == [3, 4, 5]
    assert completion.logprobs == [-0.5] * 3
    assert completion.policy_versions == [0, 0, 0]
    assert completion.finish_reason == "length"
    assert fake.bodies[0]["cache_salt"].endswith(".v0")


async def test_a_stream_gives_each_token_once_and_then_the_completion(scripted_vllm):
    async with scripted_vllm(count) as (engine, *_):
        chunks = [chunk async for chunk in engine.stream([1], SamplingParams(max_new_tokens=4))]
    assert [token for chunk in chunks for token in chunk.token_ids] == [2, 3, 4, 5]
    assert len(chunks) > 2, "as they come"
    assert chunks[-1].completion is not None
    assert chunks[-1].completion.logprobs == [-0.5] * 4


@pytest.mark.parametrize("reports_versions", [True, False], ids=["spans", "plain"])
@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "generate"])
async def test_a_request_that_lives_through_an_update_has_each_tokens_version(
    scripted_vllm, tiny_qwen3, reports_versions, streamed
):
    async with scripted_vllm(count, reports_versions=reports_versions, latency_s=0.002) as (engine, inner, fake):

        async def ask():
            if not streamed:
                return await engine.generate([1], SamplingParams(max_new_tokens=60))
            return [chunk async for chunk in engine.stream([1], SamplingParams(max_new_tokens=60))][-1].completion

        asking = asyncio.create_task(ask())
        await until(lambda: inner._running)
        await engine.pause("keep")
        await engine.update_weights(7, tiny_qwen3)
        await engine.resume()
        completion = await asking
        health = await engine.health()
    assert completion.token_ids == list(range(2, 62)), "no token lost or said twice"
    assert completion.policy_versions == sorted(completion.policy_versions)
    assert set(completion.policy_versions) <= {0, 7}
    assert completion.policy_versions[-1] == 7
    assert (health.ok, health.version) == (True, 7)
    assert [folder for _, folder in inner.updates] == [tiny_qwen3]
    salts = [body["cache_salt"].rpartition(".")[2] for body in fake.bodies]
    assert salts == (["v0"] if reports_versions else ["v0", "v7"]), "with spans it lives on in place"


async def test_an_abort_ends_what_runs_and_lets_the_next_request_wait(scripted_vllm):
    async with scripted_vllm(count, latency_s=0.002) as (engine, inner, _):
        running = asyncio.create_task(engine.generate([1], SamplingParams(max_new_tokens=10**5)))
        await until(lambda: inner._running)
        await engine.pause("abort")
        assert (await running).finish_reason == "aborted"
        waiting = asyncio.create_task(engine.generate([1], SamplingParams(max_new_tokens=2)))
        await until(lambda: engine._waiting)
        assert (await engine.health()).waiting == 1
        await engine.resume()
        assert (await waiting).token_ids == [2, 3]


async def test_a_caller_that_leaves_aborts_its_request_on_the_server(scripted_vllm):
    async with scripted_vllm(count, latency_s=0.002) as (engine, inner, _):
        asking = asyncio.create_task(engine.generate([1], SamplingParams(max_new_tokens=10**5)))
        await until(lambda: inner._running)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: not inner._running)


async def test_new_tensors_reach_the_server_in_its_own_dtype_and_leave_no_copy_behind(scripted_vllm, tiny_qwen3):
    tensors = {name: tensor + 1 for name, tensor in load_file(tiny_qwen3 / "model.safetensors").items()}
    async with scripted_vllm(count) as (engine, inner, _):
        await engine.update_weights(1, tensors.items())
        ((_, folder),) = inner.updates
    assert not Path(folder).exists()  # noqa: ASYNC240


async def test_weights_that_do_not_fit_never_reach_the_server(scripted_vllm, tiny_qwen3):
    tensors = load_file(tiny_qwen3 / "model.safetensors")
    del tensors["model.norm.weight"]
    async with scripted_vllm(count) as (engine, inner, _):
        with pytest.raises(EngineError, match=r"missing \['model\.norm\.weight'\]"):
            await engine.update_weights(1, tensors.items())
        assert (inner.updates, engine.version) == ([], 0)


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


async def test_weights_that_someone_else_published_are_a_fault(scripted_vllm, tiny_qwen3):
    async with scripted_vllm(count) as (engine, *_):
        other = VLLMEngine(tiny_qwen3, url=engine.url, max_length=100)
        await other.start()
        await other.update_weights(9, tiny_qwen3)
        health = await engine.health()
        await other.stop()
    assert not health.ok
    assert "holds weights 9, not 0" in health.detail


async def test_a_dying_engine_behind_the_server_is_an_error_for_those_who_wait(scripted_vllm):
    async with scripted_vllm(count, latency_s=0.002) as (engine, inner, _):
        asking = asyncio.create_task(engine.generate([1], SamplingParams(max_new_tokens=10**5)))
        streaming = asyncio.create_task(anext(engine.stream([1], SamplingParams(max_new_tokens=10**5))))
        await until(lambda: inner._running == 2)
        inner.crash("the GPU fell off")
        with pytest.raises(EngineError, match="the GPU fell off"):
            await asking
        streaming.cancel()


class TestWhatAnswersAtTheAddress:
    """Each is said as the engine starts, with what to do about it."""

    async def refused(self, model, fake, key=None, max_length=100):
        async with fake.serve() as url:
            engine = VLLMEngine(model, url=url, key=key, max_length=max_length)
            with pytest.raises(EngineError) as error:
                await engine.start()
            return str(error.value)

    async def test_nothing(self, tiny_qwen3):
        engine = VLLMEngine(tiny_qwen3, url="http://127.0.0.1:9", max_length=100)
        with pytest.raises(EngineError, match=r"no server answers at http://127\.0\.0\.1:9"):
            await engine.start()

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

    async def test_a_server_of_another_architecture(self, tiny_qwen3, tmp_path):
        config = (tiny_qwen3 / "config.json").read_text().replace("Qwen3ForCausalLM", "LlamaForCausalLM")
        (tmp_path / "config.json").write_text(config)
        (tmp_path / "model.safetensors").symlink_to(tiny_qwen3 / "model.safetensors")
        said = await self.refused(tmp_path, FakeVLLM(ScriptedEngine(count), tiny_qwen3))
        assert "holds Qwen3ForCausalLM of" in said
        assert "this run is LlamaForCausalLM" in said

    async def test_a_server_with_less_context(self, tiny_qwen3):
        said = await self.refused(tiny_qwen3, FakeVLLM(ScriptedEngine(count), tiny_qwen3, max_length=64))
        assert "a context of 64 tokens, less than model.max_length=100" in said
