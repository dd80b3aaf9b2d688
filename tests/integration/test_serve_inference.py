"""`sparring serve inference`: servers that a run attaches to, as a user starts and ends them."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.sglang import ServerOptions, SGLangEngine, SGLangServer
from sparring.cli import main
from sparring.errors import EngineError
from sparring.serve import _watch

pytestmark = pytest.mark.slow


@pytest.fixture
def config(tmp_path, tiny_qwen3):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{path: {tiny_qwen3}, max_length: 128}}\n"
        "env: sparring/KeyLookup-v0\n"
        "engine: {dtype: float32, slots: 4}\n"
        "sampling: {max_new_tokens: 16}\n"
    )
    return file


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_and_leaves_nothing_behind(config, tiny_qwen3, number):
    command = [sys.executable, "-m", "sparring.cli", "serve", "inference", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        (url,) = json.loads(re.search(r"'engine\.urls=(.*)'", line)[1])

        async def ask():
            engine = SGLangEngine(tiny_qwen3, url=url, max_length=128)
            await engine.start()
            await engine.publish(3, tiny_qwen3)
            said = await engine.generate([1, 2, 3], SamplingParams(max_new_tokens=5))
            await engine.stop()
            return said

        said = asyncio.run(ask())
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert len(said.token_ids) == 5
    assert set(said.policy_versions) == {3}
    assert process.returncode == 0, errors
    with pytest.raises(EngineError, match="no server answers"):
        asyncio.run(SGLangEngine(tiny_qwen3, url=url, max_length=128).start())


def test_a_configuration_that_attaches_is_refused(config, capsys):
    assert main(["serve", "inference", str(config), 'engine.urls=["http://127.0.0.1:1"]']) == 2
    assert "run already" in capsys.readouterr().err


@pytest.mark.parametrize(("host", "warns"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_servers_for_other_machines_come_with_a_warning(config, capsys, host, warns):
    assert main(["serve", "inference", str(config), "--host", host, "model.path=/no/such/model"]) == 2
    assert ("machines that you trust" in capsys.readouterr().err) is warns


async def test_a_server_that_dies_ends_the_serving_with_its_last_words(tiny_qwen3, tmp_path):
    stand_in = (sys.executable, "-m", "sparring.backend.engines.fake_sglang")
    options = ServerOptions(dtype="float32", max_running=2)
    server = SGLangServer(tiny_qwen3, options, max_length=64, log_path=tmp_path / "log", command=stand_in)
    await server.start()
    try:
        watching = asyncio.create_task(_watch([server]))
        os.killpg(server.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="killed by SIGKILL"):
            await asyncio.wait_for(watching, 20)
    finally:
        await server.stop()
