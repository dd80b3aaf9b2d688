"""What engines on servers keep, over HTTP, against each kind of server with scripted tokens."""

import asyncio
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.remote.pool import EnginePool
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.errors import ConfigError, EngineError

only_sglang = pytest.mark.parametrize("kind", ["sglang"], indirect=True)


def count(prompt):
    """Goes on counting, so a cut request shows."""
    return range(prompt[-1] + 1, 10**6)


async def until(condition) -> None:
    """Wait for something that the server's side brings about; that it does not is a failure."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # the scripted engine has no event to wait for
            await asyncio.sleep(0.002)


async def test_a_completion_has_the_tokens_logprobs_and_versions_of_the_server(scripted, kind):
    async with scripted(count) as (engine, _inner, fake):
        completion = await engine.generate([1, 2], SamplingParams(max_new_tokens=3))
    assert completion.token_ids == [3, 4, 5]
    assert completion.logprobs == [-0.5] * 3
    assert completion.policy_versions == [0, 0, 0]
    assert completion.finish_reason == "length"
    assert fake.bodies[0][kind.salt].endswith(".v0")


async def test_two_engines_on_one_server_share_no_cached_prefix(kind, scripted, tiny_qwen3):
    """Their weights of one version differ: a second run on a server starts at version 0 again."""
    async with scripted(count) as (engine, _inner, fake):
        await engine.generate([1, 2], SamplingParams(max_new_tokens=1))
        other = kind.engine(tiny_qwen3, url=engine.url, max_length=1000)
        await other.start()
        await other.generate([1, 2], SamplingParams(max_new_tokens=1))
        await other.stop()
    salts = {body[kind.salt] for body in fake.bodies}
    assert len(salts) == 2


async def test_a_stream_gives_each_token_once_and_then_the_completion(scripted):
    async with scripted(count) as (engine, *_):
        chunks = [chunk async for chunk in engine.stream([1], SamplingParams(max_new_tokens=4))]
    assert [token for chunk in chunks for token in chunk.token_ids] == [2, 3, 4, 5]
    assert len(chunks) > 2, "as they come"
    assert chunks[-1].completion is not None
    assert chunks[-1].completion.token_ids == [2, 3, 4, 5]
    assert chunks[-1].completion.logprobs == [-0.5] * 4


@pytest.mark.parametrize("reports_versions", [True, False], ids=["tells versions", "plain"])
@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "generate"])
async def test_a_request_that_lives_through_an_update_has_each_tokens_version(
    scripted, kind, tiny_qwen3, reports_versions, streamed
):
    async with scripted(count, reports_versions=reports_versions, latency_s=0.002) as (engine, inner, fake):

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
    assert engine.version == 7
    assert [folder for _, folder in inner.updates] == [tiny_qwen3]
    salts = [body[kind.salt].rpartition(".")[2] for body in fake.bodies]
    assert salts == (["v0"] if reports_versions else ["v0", "v7"]), "where the server tells, it lives on in place"


async def test_an_abort_ends_what_runs_and_lets_the_next_request_wait(scripted):
    async with scripted(count, latency_s=0.002) as (engine, inner, _):
        running = asyncio.create_task(engine.generate([1], SamplingParams(max_new_tokens=10**5)))
        await until(lambda: inner._running)
        await engine.pause("abort")
        assert (await running).finish_reason == "aborted"
        waiting = asyncio.create_task(engine.generate([1], SamplingParams(max_new_tokens=2)))
        await until(lambda: engine._waiting)
        assert (await engine.health()).waiting == 1
        await engine.resume()
        assert (await waiting).token_ids == [2, 3]


async def test_a_caller_that_leaves_aborts_its_request_on_the_server(scripted):
    async with scripted(count, latency_s=0.002) as (engine, inner, _):
        asking = asyncio.create_task(engine.generate([1], SamplingParams(max_new_tokens=10**5)))
        await until(lambda: inner._running)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: not inner._running)


async def test_closing_a_stream_aborts_its_request_on_the_server(scripted):
    async with scripted(count, latency_s=0.002) as (engine, inner, _):
        stream = engine.stream([1], SamplingParams(max_new_tokens=10**5))
        await anext(stream)
        assert inner._running == 1
        await stream.aclose()
        await until(lambda: not inner._running)


async def test_new_tensors_reach_the_server_in_its_own_dtype_and_leave_no_copy_behind(scripted, tiny_qwen3):
    tensors = {name: tensor + 1 for name, tensor in load_file(tiny_qwen3 / "model.safetensors").items()}
    async with scripted(count) as (engine, inner, _):
        await engine.update_weights(1, tensors.items())
        ((version, folder),) = inner.updates
    assert version == 1
    assert not Path(folder).exists()  # noqa: ASYNC240


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing ['model.norm.weight']"),
        (lambda t: t.update(stranger=torch.zeros(1)), "unknown ['stranger']"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), "has shape [3]"),
    ],
    ids=["missing", "unknown", "shape"],
)
async def test_weights_that_do_not_fit_never_reach_the_server(scripted, tiny_qwen3, change, said):
    tensors = load_file(tiny_qwen3 / "model.safetensors")
    change(tensors)
    async with scripted(count) as (engine, inner, _):
        with pytest.raises(EngineError) as refusal:
            await engine.update_weights(1, tensors.items())
        assert said in str(refusal.value)
        assert inner.updates == []
        assert engine.version == 0


async def test_a_tied_head_may_be_among_the_tensors(scripted, tiny_qwen3):
    tensors = load_file(tiny_qwen3 / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    async with scripted(count) as (engine, *_):
        await engine.update_weights(1, tensors.items())
        assert engine.version == 1


@only_sglang
async def test_a_cut_distribution_asks_for_its_own_logprobs(scripted):
    async with scripted(count) as (engine, _inner, fake):
        await engine.generate([1], SamplingParams(max_new_tokens=2, top_p=0.9))
    assert fake.bodies[0]["return_sampling_mask"] is True
    assert fake.bodies[0]["sampling_params"]["top_k"] > 10**6, "SGLang gives them with a finite top_k alone"


@only_sglang
async def test_a_seed_is_refused_where_the_server_would_ignore_it(scripted):
    async with scripted(count, seeds=False) as (engine, *_):
        with pytest.raises(EngineError, match=r"engine\.deterministic=true"):
            await engine.generate([1], SamplingParams(max_new_tokens=2, seed=1))


async def test_a_prompt_that_fills_the_context_is_refused(scripted):
    async with scripted(count, max_length=4) as (engine, *_):
        with pytest.raises(EngineError, match="leaves no room in a context of 4"):
            await engine.generate([1, 2, 3, 4], SamplingParams())


async def test_a_dying_engine_behind_the_server_is_an_error_for_those_who_wait(scripted):
    async with scripted(count, latency_s=0.002) as (engine, inner, _):
        asking = asyncio.create_task(engine.generate([1], SamplingParams(max_new_tokens=10**5)))
        stream = engine.stream([1], SamplingParams(max_new_tokens=10**5))
        await anext(stream)
        await until(lambda: inner._running == 2)
        inner.crash("the GPU fell off")
        with pytest.raises(EngineError, match="the GPU fell off"):
            await asking
        with pytest.raises(EngineError, match="the GPU fell off"):
            async for _ in stream:
                pass


async def test_stop_fails_what_is_pending(scripted):
    async with scripted(count, latency_s=0.002) as (engine, inner, _):
        asking = asyncio.create_task(engine.generate([1], SamplingParams(max_new_tokens=10**5)))
        await until(lambda: inner._running)
        await engine.stop()
        with pytest.raises(EngineError):
            await asking
        with pytest.raises(EngineError, match="was stopped"):
            await engine.generate([1], SamplingParams())


async def test_nothing_at_the_address_is_said(kind, tiny_qwen3):
    engine = kind.engine(tiny_qwen3, url="http://127.0.0.1:9", max_length=100)
    with pytest.raises(EngineError, match=r"no server answers at http://127\.0\.0\.1:9"):
        await engine.start()


async def test_another_model_on_the_server_is_refused(kind, scripted, tiny_qwen3, tmp_path):
    config = (tiny_qwen3 / "config.json").read_text().replace("Qwen3ForCausalLM", "LlamaForCausalLM")
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").symlink_to(tiny_qwen3 / "model.safetensors")
    async with scripted(count) as (engine, *_):
        other = kind.engine(tmp_path, url=engine.url, max_length=100)
        with pytest.raises(EngineError, match=r"holds Qwen3ForCausalLM .* this run is LlamaForCausalLM"):
            await other.start()


async def test_weights_that_someone_else_published_are_a_fault(kind, scripted, tiny_qwen3):
    async with scripted(count) as (engine, *_):
        other = kind.engine(tiny_qwen3, url=engine.url, max_length=100)
        await other.start()
        await other.update_weights(9, tiny_qwen3)
        health = await engine.health()
        assert not health.ok
        assert "holds weights 9, not 0" in health.detail
        await other.stop()


async def test_an_engine_that_is_not_live_streams_whole_answers(kind, scripted, tiny_qwen3):
    async with scripted(count) as (live, _inner, fake):
        engine = kind.engine(tiny_qwen3, url=live.url, max_length=100, live=False)
        await engine.start()
        fake.bodies.clear()
        chunks = [chunk async for chunk in engine.stream([1], SamplingParams(max_new_tokens=4))]
        await engine.stop()
    assert [chunk.token_ids for chunk in chunks] == [[2, 3, 4, 5], []]
    assert [body["stream"] for body in fake.bodies] == [False]


async def test_weights_that_were_staged_and_never_loaded_do_not_stand_in_for_others(scripted, tiny_qwen3):
    tensors = load_file(tiny_qwen3 / "model.safetensors")
    async with scripted(count) as (engine, inner, _):
        await engine.stage_weights(5, tiny_qwen3)
        await engine.update_weights(5, tensors.items())
        staged = await engine.stage_weights(6, tiny_qwen3)
        with pytest.raises(EngineError, match="7 were not staged"):
            await engine.update_weights(7, staged)
        await engine.update_weights(6, staged)
    first, second = (folder for _, folder in inner.updates)
    assert first != tiny_qwen3
    assert second == tiny_qwen3


async def test_what_waits_in_a_pause_at_a_server_that_vanishes_for_good_moves_in_its_pool(kind, tiny_qwen3):
    """One that we did not start: nothing tells us of its end but that it answers no more."""
    servers = [AsyncExitStack(), AsyncExitStack()]
    try:
        inners = [ScriptedEngine(count) for _ in servers]
        urls = [
            await server.enter_async_context(kind.fake(inner, tiny_qwen3).serve())
            for server, inner in zip(servers, inners, strict=True)
        ]
        engines = [kind.engine(tiny_qwen3, url=url, max_length=1000) for url in urls]
        pool = EnginePool(engines, check_every_s=60)
        await pool.start()
        await pool.pause()
        waiting = [asyncio.create_task(pool.generate([n], SamplingParams(max_new_tokens=3))) for n in range(4)]
        await until(lambda: [engine._waiting for engine in engines] == [2, 2])
        await servers[0].aclose()
        await pool.update_weights(7, tiny_qwen3)
        await pool.resume()
        async with asyncio.timeout(10):
            completions = await asyncio.gather(*waiting)
        assert [completion.token_ids for completion in completions] == [[n + 1, n + 2, n + 3] for n in range(4)]
        assert {version for completion in completions for version in completion.policy_versions} == {7}
        assert "server 0 was taken out: no server answers" in (await pool.health()).detail
        await pool.stop()
    finally:
        for server in servers:
            await server.aclose()


async def test_a_server_that_cannot_listen_starts_no_engine(kind, tiny_qwen3):
    inner = ScriptedEngine([])
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="in use"):
        async with kind.fake(inner, tiny_qwen3).serve(port=taken.getsockname()[1]):
            pass
    assert not inner._started
