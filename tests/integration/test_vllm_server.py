"""The server's process: started, killed in mid-request, orphaned. The stand-in runs in vLLM's place, as a program."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.remote.process import ProcessOptions
from sparring.backend.engines.remote.transport import ENGINE_KEY
from sparring.backend.engines.vllm import VLLMEngine, VLLMServer
from sparring.backend.engines.vllm.server import _LAUNCHER
from sparring.cli import main
from sparring.errors import EngineError

pytestmark = pytest.mark.slow

STAND_IN = (sys.executable, "-P", str(_LAUNCHER), "sparring.backend.engines.fake_vllm")


def server(model, tmp_path, command=STAND_IN, **options):
    knobs = ProcessOptions(dtype="float32", max_running=4, **options)
    return VLLMServer(model, knobs, max_length=128, log_path=tmp_path / "server.log", command=command)


async def test_an_engine_starts_its_server_samples_by_its_key_and_ends_it(tiny_qwen3, tmp_path):
    process = server(tiny_qwen3, tmp_path)
    engine = VLLMEngine(tiny_qwen3, server=process, max_length=128)
    await engine.start()
    completion = await engine.generate([1, 2, 3], SamplingParams(max_new_tokens=4))
    assert len(completion.token_ids) == 4
    stranger = VLLMEngine(tiny_qwen3, url=engine.url, max_length=128)
    with pytest.raises(EngineError, match="wants an API key"):
        await stranger.start()
    pid = process.pid
    await engine.stop()
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert process.key not in (tmp_path / "server.log").read_text()


async def test_a_server_killed_in_mid_request_fails_it_with_how_it_died(tiny_qwen3, tmp_path):
    process = server(tiny_qwen3, tmp_path)
    engine = VLLMEngine(tiny_qwen3, server=process, max_length=128)
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
        ("raise SystemExit('torch.OutOfMemoryError: CUDA out of memory')", r"lower engine\.memory_fraction"),
        ("raise ModuleNotFoundError(\"No module named 'vllm'\")", "name the Python of vLLM's environment"),
    ],
    ids=["memory", "no vllm"],
)
async def test_a_server_that_dies_as_it_starts_says_why(tiny_qwen3, tmp_path, code, said):
    with pytest.raises(EngineError, match=said):
        await server(tiny_qwen3, tmp_path, command=(sys.executable, "-c", code)).start()


def test_a_server_dies_with_the_process_that_started_it(tiny_qwen3, tmp_path):
    program = f"""
import asyncio
from pathlib import Path
from sparring.backend.engines.remote.process import ProcessOptions
from sparring.backend.engines.vllm import VLLMServer

async def main():
    options = ProcessOptions(dtype="float32", max_running=4)
    process = VLLMServer(Path({str(tiny_qwen3)!r}), options, max_length=128,
                         log_path=Path({str(tmp_path / "log")!r}), command={STAND_IN!r})
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


def test_servers_for_others_want_a_key_that_the_others_know(tmp_path, tiny_qwen3, monkeypatch, capsys):
    monkeypatch.delenv("SPARRING_ENGINE_KEY", raising=False)
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{path: {tiny_qwen3}}}\nenv: sparring/KeyLookup-v0\nengine: vllm\n")
    assert main(["serve", "inference", str(file)]) == 2
    assert "set SPARRING_ENGINE_KEY" in capsys.readouterr().err


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.timeout(600)
async def test_a_synchronous_run_samples_from_its_newest_weights(tiny_qwen3, tmp_path):
    process = server(tiny_qwen3, tmp_path)
    url = await process.start()
    config = {
        "model": {"path": str(tiny_qwen3), "tool_template": "hermes-compact", "max_length": 128},
        "env": {"id": "noisy_env:test/Noisy-v0"},
        "engine": {"type": "vllm", "urls": [url], "dtype": "float32"},
        "sampling": {"max_new_tokens": 8},
        "rollout": {"group_size": 4, "groups_per_step": 2, "max_running_groups": 4, "max_turns": 2, "staleness": 0},
        "trainer": {"steps": 2, "learning_rate": 1e-2, "dtype": "float32"},
        "eval": {"every": 0, "tasks": 2},
        "run_dir": str(tmp_path / "run"),
    }
    (tmp_path / "noisy.yaml").write_text(json.dumps(config))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent / "run_envs"), ENGINE_KEY: str(process.key)}
    command = [sys.executable, "-m", "sparring.cli", "train", str(tmp_path / "noisy.yaml")]
    try:
        done = await asyncio.to_thread(
            subprocess.run, command, env=environment, capture_output=True, text=True, timeout=560
        )
    finally:
        await process.stop()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record for line in lines if (record := json.loads(line))["kind"] == "step"]
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["drift/max/lag0"] < 1e-3 for record in steps)
    assert str(process.key) not in "".join(file.read_text() for file in (tmp_path / "run").glob("*.yaml"))
