"""A server's process, of each kind: started, killed, hung, orphaned. The stand-ins run in their places, as programs."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import pytest

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.remote.layout import WeightLayout
from sparring.backend.engines.remote.process import ProcessOptions, check_gpu_memory
from sparring.backend.engines.sglang import ServerOptions, SGLangEngine, SGLangServer
from sparring.backend.engines.vllm import VLLMEngine, VLLMServer
from sparring.backend.engines.vllm.server import _LAUNCHER
from sparring.errors import EngineError

pytestmark = pytest.mark.slow


class Kind(NamedTuple):
    engine: Any
    server: Any
    options: type[ProcessOptions]
    stand_in: tuple[str, ...]


FAKES = "sparring.backend.engines"
KINDS = {
    "sglang": Kind(SGLangEngine, SGLangServer, ServerOptions, (sys.executable, "-m", f"{FAKES}.fake_sglang")),
    "vllm": Kind(VLLMEngine, VLLMServer, ProcessOptions, (sys.executable, "-P", str(_LAUNCHER), f"{FAKES}.fake_vllm")),
}


@pytest.fixture(params=KINDS)
def kind(request) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def server(kind, tiny_qwen3, tmp_path):
    def make(command=kind.stand_in, **options):
        knobs = kind.options(dtype="float32", max_running=4, **options)
        return kind.server(tiny_qwen3, knobs, max_length=128, log_path=tmp_path / "server.log", command=command)

    return make


async def test_an_engine_starts_its_server_samples_and_ends_it(kind, server, tiny_qwen3):
    process = server()
    engine = kind.engine(tiny_qwen3, server=process, max_length=128)
    await engine.start()
    completion = await engine.generate([1, 2, 3], SamplingParams(max_new_tokens=4))
    assert len(completion.token_ids) == 4
    pid = process.pid
    await engine.stop()
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_server_killed_in_a_pause_fails_what_waits_with_how_it_died(kind, server, tiny_qwen3):
    process = server()
    engine = kind.engine(tiny_qwen3, server=process, max_length=128)
    await engine.start()
    await engine.pause()
    waiting = asyncio.create_task(engine.generate([1], SamplingParams(max_new_tokens=4)))
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGKILL)
    for attempt in (engine.resume(), waiting, engine.generate([1], SamplingParams(max_new_tokens=4)), engine.health()):
        with pytest.raises(EngineError, match=r"killed by SIGKILL[\s\S]*server\.log"):
            async with asyncio.timeout(5):
                await attempt
    await engine.stop()


async def test_a_server_killed_in_mid_request_fails_it_with_how_it_died(kind, server, tiny_qwen3):
    process = server()
    engine = kind.engine(tiny_qwen3, server=process, max_length=128)
    await engine.start()
    stream = engine.stream([1], SamplingParams(max_new_tokens=100))
    await anext(stream)
    whole = asyncio.create_task(engine.generate([1], SamplingParams(max_new_tokens=100)))
    async with asyncio.timeout(30):
        while len(engine._running) < 2:  # noqa: ASYNC110  # both are on their way; a pause keeps them from ending
            await asyncio.sleep(0.002)
    await engine.pause()
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"killed by SIGKILL[\s\S]*server\.log"):
        async for _ in stream:
            pass
    with pytest.raises(EngineError, match="killed by SIGKILL"):
        await whole
    await engine.stop()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit('CUDA out of memory. Tried to allocate 2 GiB')", r"lower engine\.memory_fraction"),
        ("import a_module_that_is_not_there", "exit status 1"),
        ("raise ModuleNotFoundError(\"No module named '{package}'\")", "name the Python of {name}'s environment"),
    ],
    ids=["memory", "crash", "no package"],
)
async def test_a_server_that_dies_as_it_starts_says_why(kind, server, code, said):
    names = {"package": kind.server.package, "name": kind.server.kind}
    with pytest.raises(EngineError, match=said.format(**names)):
        await server(command=(sys.executable, "-c", code.format(**names))).start()


async def test_a_server_that_hangs_as_it_starts_has_a_deadline(server):
    hung = server(command=("sleep", "60"), start_timeout_s=0.5)
    hung._arguments = lambda port: []  # sleep takes none of a server's
    with pytest.raises(EngineError, match=r"not ready after 0\.5 s"):
        await hung.start()


async def test_a_python_that_is_not_there_is_said(server):
    with pytest.raises(EngineError, match=r"set engine\.python"):
        await server(command=("/no/such/python",)).start()


def test_a_server_dies_with_the_process_that_started_it(kind, tiny_qwen3, tmp_path):
    program = f"""
import asyncio
from pathlib import Path
from {kind.options.__module__} import {kind.options.__name__}
from {kind.server.__module__} import {kind.server.__name__}

async def main():
    options = {kind.options.__name__}(dtype="float32", max_running=4)
    process = {kind.server.__name__}(Path({str(tiny_qwen3)!r}), options, max_length=128,
                                     log_path=Path({str(tmp_path / "log")!r}), command={kind.stand_in!r})
    await process.start()
    print(process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while _alive(child):
        assert time.monotonic() < deadline, f"server {child} outlived the process that started it"
        time.sleep(0.05)


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A machine whose `nvidia-smi` says what the test wants."""

    def says(total_mib: int, free_mib: int) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\necho '{total_mib}, {free_mib}'\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return says


def test_too_little_memory_is_said_before_loading_with_the_numbers(nvidia_smi, tiny_qwen3):
    layout = WeightLayout.of_model(tiny_qwen3)
    big = WeightLayout(layout.folder, layout.architecture, "bfloat16", True, {"w": (50_000, 100_000)})
    nvidia_smi(16_000, 15_000)
    with pytest.raises(EngineError, match=r"5\.00B parameters in bfloat16 take 9\.3 GiB.*0\.35 of 16 GiB is 5\.5 GiB"):
        check_gpu_memory(big, ServerOptions(), "SGLang")
    nvidia_smi(16_000, 2_000)
    with pytest.raises(EngineError, match=r"GPU 0 has 2\.0 of 16 GiB free"):
        check_gpu_memory(layout, ServerOptions(), "SGLang")
    nvidia_smi(16_000, 15_000)
    check_gpu_memory(layout, ServerOptions(), "SGLang")


def test_without_a_gpu_it_is_said(monkeypatch, tmp_path, tiny_qwen3):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="SGLang needs one"):
        check_gpu_memory(WeightLayout.of_model(tiny_qwen3), ServerOptions(), "SGLang")


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
