"""A vLLM server's key, and a run on such a server. The stand-in runs in vLLM's place, as a program."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparring.backend.engines.remote.process import ProcessOptions
from sparring.backend.engines.remote.transport import ENGINE_KEY
from sparring.backend.engines.vllm import VLLMEngine, VLLMServer
from sparring.backend.engines.vllm.server import _LAUNCHER
from sparring.cli import main
from sparring.errors import EngineError

pytestmark = pytest.mark.slow

STAND_IN = (sys.executable, "-P", str(_LAUNCHER), "sparring.backend.engines.fake_vllm")


def server(model, tmp_path):
    knobs = ProcessOptions(dtype="float32", max_running=4)
    return VLLMServer(model, knobs, max_length=160, log_path=tmp_path / "server.log", command=STAND_IN)


async def test_an_engine_s_own_server_answers_to_its_key_alone_which_no_log_has(tiny_qwen3, tmp_path):
    process = server(tiny_qwen3, tmp_path)
    engine = VLLMEngine(tiny_qwen3, server=process, max_length=128)
    await engine.start()
    stranger = VLLMEngine(tiny_qwen3, url=engine.url, max_length=128)
    with pytest.raises(EngineError, match="wants an API key"):
        await stranger.start()
    await engine.stop()
    assert process.key
    assert process.key not in (tmp_path / "server.log").read_text()


def test_servers_for_others_want_a_key_that_the_others_know(tmp_path, tiny_qwen3, monkeypatch, capsys):
    monkeypatch.delenv("SPARRING_ENGINE_KEY", raising=False)
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{path: {tiny_qwen3}}}\nenv: sparring/KeyLookup-v0\nengine: vllm\n")
    assert main(["serve", "inference", str(file)]) == 2
    assert "set SPARRING_ENGINE_KEY" in capsys.readouterr().err


@pytest.mark.timeout(600)
async def test_a_synchronous_run_samples_from_its_newest_weights(tiny_qwen3, tmp_path, noisy_config):
    process = server(tiny_qwen3, tmp_path)
    url = await process.start()
    config = noisy_config(
        engine={"type": "vllm", "urls": [url]},
        rollout={"max_turns": 2, "staleness": 0},
        trainer={"steps": 2, "learning_rate": 1e-2},
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent / "run_envs"), ENGINE_KEY: str(process.key)}
    command = [sys.executable, "-m", "sparring.cli", "train", str(config)]
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
