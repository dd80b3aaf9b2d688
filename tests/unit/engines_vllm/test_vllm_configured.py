import itertools
import json

import pytest

from sparring.backend.engines.configured import make_remote, make_servers
from sparring.backend.engines.remote.pool import EnginePool
from sparring.backend.engines.vllm import VLLMEngine
from sparring.config import EngineConfig, EnvConfig, ModelConfig, RolloutConfig, RunConfig


def config(model, **engine):
    return RunConfig(
        model=ModelConfig(path=str(model)),
        env=EnvConfig(id="sparring/GSM8K-v0"),
        engine=EngineConfig(type="vllm", **engine),
        rollout=RolloutConfig(staleness=0),
    )


def test_servers_that_run_already_are_attached_to_with_the_key_of_the_environment(tiny_qwen3, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARRING_ENGINE_KEY", "theirs")
    engine = make_remote(config(tiny_qwen3, urls=["http://127.0.0.1:1/"]), tiny_qwen3, tmp_path)
    assert isinstance(engine, VLLMEngine)
    assert engine.url == "http://127.0.0.1:1"
    assert engine._transport._headers == {"Authorization": "Bearer theirs"}
    assert isinstance(make_remote(config(tiny_qwen3, servers=2), tiny_qwen3, tmp_path), EnginePool)


def test_a_server_is_started_on_loopback_with_what_the_engine_needs(tiny_qwen3, tmp_path, monkeypatch):
    monkeypatch.delenv("SPARRING_ENGINE_KEY", raising=False)
    knobs = {"servers": 2, "slots": 33, "python": "/vllm/python", "arguments": ["--enforce-eager"]}
    servers = make_servers(config(tiny_qwen3, **knobs), tiny_qwen3, tmp_path)
    for i, server in enumerate(servers):
        arguments = server._arguments(8000)
        given = dict(itertools.pairwise(arguments))
        assert arguments[:2] == ["serve", str(tiny_qwen3)]
        assert (given["--host"], given["--port"], given["--max-num-seqs"]) == ("127.0.0.1", "8000", "17")
        assert given["--logprobs-mode"] == "processed_logprobs"
        assert json.loads(given["--weight-transfer-config"]) == {"backend": "ipc"}
        assert arguments[-1] == "--enforce-eager"
        assert next(iter(server._program())) == "/vllm/python"
        assert server._environment()["VLLM_SERVER_DEV_MODE"] == "1"
        assert server._log_path == tmp_path / f"vllm-{i}.log"


def test_each_server_has_a_key_of_its_own_which_no_list_of_processes_shows(tiny_qwen3, tmp_path, monkeypatch):
    monkeypatch.delenv("SPARRING_ENGINE_KEY", raising=False)
    first, second = make_servers(config(tiny_qwen3, servers=2), tiny_qwen3, tmp_path)
    assert first.key
    assert first.key != second.key
    assert first._environment()["VLLM_API_KEY"] == first.key
    assert all(first.key not in argument for argument in [*first._program(), *first._arguments(1)])


@pytest.mark.parametrize("deterministic", [True, False])
def test_determinism_is_vllms_batch_invariance(tiny_qwen3, tmp_path, deterministic):
    (server,) = make_servers(config(tiny_qwen3, deterministic=deterministic), tiny_qwen3, tmp_path)
    assert ("VLLM_BATCH_INVARIANT" in server._environment()) is deterministic
