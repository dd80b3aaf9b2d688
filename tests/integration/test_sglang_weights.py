"""New weights for servers in processes of their own, by every route, with servers that die, hang and come back.

The stand-in runs in SGLang's place; what it samples from is compared with the embedded engine on the same weights.
"""

import asyncio
import os
import signal
import sys
import time
from contextlib import AsyncExitStack

import pytest
import torch
from safetensors.torch import load_file

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.remote.pool import EnginePool
from sparring.backend.engines.sglang import ServerOptions, SGLangEngine, SGLangServer
from sparring.backend.engines.sglang.options import WeightOptions
from sparring.backend.engines.torch_engine import TorchEngine
from sparring.errors import EngineError

pytestmark = pytest.mark.slow

STAND_IN = (sys.executable, "-m", "sparring.backend.engines.fake_sglang")
PROMPT, GREEDY = [5, 6, 7, 8], SamplingParams(max_new_tokens=6, temperature=0)
PIECES = 64 * 2**10  # the tiny model has 2.5 MB in float32


def changed(folder, seed):
    generator = torch.Generator().manual_seed(seed)
    named = load_file(folder / "model.safetensors")
    return {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in named.items()}


async def sampled_from(folder, weights):
    """What a model with these weights says, greedily."""
    engine = TorchEngine(folder, slots=2, max_length=128, dtype="float32", device="cpu")
    await engine.start()
    try:
        await engine.update_weights(1, list(weights.items()))
        return await engine.generate(PROMPT, GREEDY)
    finally:
        await engine.stop()


async def assert_serves(engine, folder, weights, version):
    expected, found = await sampled_from(folder, weights), await engine.generate(PROMPT, GREEDY)
    assert found.token_ids == expected.token_ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert set(found.policy_versions) == {version}


@pytest.fixture
async def start(tiny_qwen3, tmp_path):
    """Engines, each on a server of its own, and the servers."""
    async with AsyncExitStack() as stack:

        async def make(*, port=0, **options):
            knobs = ServerOptions(dtype="float32", max_running=4, port=port)
            log = tmp_path / f"server-{time.monotonic_ns()}.log"
            server = SGLangServer(tiny_qwen3, knobs, max_length=1000, log_path=log, command=STAND_IN)
            stack.push_async_callback(server.stop)
            weights = WeightOptions(**options)
            engine = SGLangEngine(tiny_qwen3, url=await server.start(), max_length=1000, weights=weights)
            await engine.start()
            stack.push_async_callback(engine.stop)
            return engine, server

        yield make


@pytest.mark.parametrize("route", ["ipc", "group", "disk"])
@pytest.mark.parametrize("bucket_bytes", [2**30, PIECES], ids=["whole", "pieces"])
async def test_by_every_route_the_server_samples_from_what_it_was_sent(start, tiny_qwen3, route, bucket_bytes):
    engine, _ = await start(route=route, bucket_bytes=bucket_bytes)
    for version in (1, 2, 3):
        weights = changed(tiny_qwen3, version)
        await engine.publish(version, weights.items())
        await assert_serves(engine, tiny_qwen3, weights, version)


@pytest.mark.parametrize("route", ["ipc", "group"])
async def test_requests_live_through_an_update_in_pieces(start, tiny_qwen3, route):
    engine, _ = await start(route=route, bucket_bytes=PIECES)
    weights = changed(tiny_qwen3, 1)
    begun, seen = asyncio.Event(), []

    async def ask():
        async for chunk in engine.stream(PROMPT, SamplingParams(max_new_tokens=900)):
            seen.append(chunk)
            begun.set()

    staged = await engine.stage_weights(4, weights.items())
    asking = asyncio.create_task(ask())
    await begun.wait()
    await engine.pause()
    await engine.update_weights(4, staged)
    await engine.resume()
    await asking
    completion = seen[-1].completion
    assert completion is not None
    assert len(completion.token_ids) == 900
    assert completion.policy_versions == sorted(completion.policy_versions)
    assert set(completion.policy_versions) == {0, 4}


async def test_a_pool_s_servers_each_have_a_group_and_a_killed_one_is_left_out(start, tiny_qwen3):
    (first, doomed), (second, _) = [await start(route="group", bucket_bytes=PIECES) for _ in range(2)]
    pool = EnginePool([first, second], check_every_s=60)
    weights = changed(tiny_qwen3, 1)
    staged = await pool.stage_weights(1, weights.items())
    await pool.pause()
    assert doomed.pid is not None
    os.killpg(doomed.pid, signal.SIGKILL)
    began = time.monotonic()
    await pool.update_weights(1, staged)
    await pool.resume()
    await pool.verify_weights()
    assert time.monotonic() - began < 20
    assert "server 0 was taken out" in (await pool.health()).detail
    await assert_serves(pool, tiny_qwen3, weights, 1)


async def test_a_server_that_hangs_in_a_broadcast_is_given_up_by_the_deadline(start, tiny_qwen3):
    (hung, process), (other, _) = [await start(route="group", bucket_bytes=PIECES, deadline_s=3.0) for _ in range(2)]
    pool = EnginePool([hung, other], check_every_s=60)
    weights = changed(tiny_qwen3, 1)
    staged = await pool.stage_weights(1, weights.items())
    await pool.pause()
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        await pool.update_weights(1, staged)
        assert 2.9 < time.monotonic() - began < 12
        await pool.resume()
        assert "server 0 was taken out" in (await pool.health()).detail
        await assert_serves(pool, tiny_qwen3, weights, 1)
    finally:
        os.killpg(process.pid, signal.SIGCONT)


async def test_a_server_that_hangs_as_a_group_is_formed_is_given_up_by_the_deadline(start, tiny_qwen3):
    engine, process = await start(route="group", deadline_s=2.0)
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(EngineError, match=r"gave no answer in"):
            await engine.stage_weights(1, changed(tiny_qwen3, 1).items())
        assert time.monotonic() - began < 12
    finally:
        os.killpg(process.pid, signal.SIGCONT)


async def test_a_server_that_was_restarted_gets_a_group_anew(start, tiny_qwen3):
    engine, process = await start(route="group", bucket_bytes=PIECES)
    await engine.publish(1, changed(tiny_qwen3, 1).items())
    port = int(engine.url.rpartition(":")[2])
    await process.stop()
    await start(port=port)
    health = await engine.health()
    assert not health.ok
    assert "was it restarted?" in health.detail
    weights = changed(tiny_qwen3, 2)
    await engine.publish(2, weights.items())
    await assert_serves(engine, tiny_qwen3, weights, 2)


async def test_an_address_that_is_not_this_machine_s_is_said(start, tiny_qwen3):
    engine, _ = await start(route="group", host="192.0.2.1")
    with pytest.raises(EngineError, match=r"cannot listen at 192\.0\.2\.1.*engine\.group_host"):
        await engine.stage_weights(1, changed(tiny_qwen3, 1).items())


@pytest.mark.parametrize("route", ["ipc", "group"])
async def test_weights_that_turn_out_wrong_half_way_leave_an_error_and_the_next_update_repairs(
    start, tiny_qwen3, route
):
    engine, _ = await start(route=route, bucket_bytes=PIECES)
    weights = changed(tiny_qwen3, 1)
    short = dict(list(weights.items())[:-1])
    with pytest.raises(EngineError, match=r"missing \['model\.norm.*may hold a part of weights 1 now"):
        await engine.publish(1, short.items())
    assert engine.version == 0
    await engine.publish(2, weights.items())
    await assert_serves(engine, tiny_qwen3, weights, 2)


async def test_memory_that_was_lent_comes_back_with_the_next_weights(start, tiny_qwen3):
    engine, _ = await start(route="ipc")
    await engine.release_memory()
    waiting = asyncio.create_task(engine.generate(PROMPT, GREEDY))
    with pytest.raises(EngineError, match="no new weights since"):
        await engine.resume()
    weights = changed(tiny_qwen3, 1)
    await engine.publish(1, weights.items())
    assert (await waiting).token_ids == (await sampled_from(tiny_qwen3, weights)).token_ids
    await assert_serves(engine, tiny_qwen3, weights, 1)


async def test_memory_in_use_is_not_lent(start):
    engine, _ = await start()
    stream = engine.stream(PROMPT, SamplingParams(max_new_tokens=100))
    await anext(stream)
    with pytest.raises(EngineError, match="1 requests run"):
        await engine.release_memory()
    await stream.aclose()
