from pathlib import Path

import pytest

from sparring.backend.engines.configured import make_remote
from sparring.backend.engines.remote.pool import EnginePool
from sparring.backend.engines.sglang import SGLangEngine
from sparring.config import EngineConfig, EnvConfig, ModelConfig, RunConfig


def make(model: Path, logs: Path, **engine):
    config = RunConfig(
        model=ModelConfig(path=str(model)),
        env=EnvConfig(id="sparring/GSM8K-v0"),
        engine=EngineConfig(type="sglang", **engine),
    )
    return make_remote(config, model, logs)


@pytest.mark.parametrize(("engine", "kind"), [({}, SGLangEngine), ({"servers": 2}, EnginePool)])
def test_several_servers_are_one_pool(tiny_qwen3, tmp_path, engine, kind):
    assert isinstance(make(tiny_qwen3, tmp_path, **engine), kind)


def test_servers_that_run_already_are_not_started(tiny_qwen3, tmp_path):
    engine = make(tiny_qwen3, tmp_path, urls=["http://127.0.0.1:1/"])
    assert isinstance(engine, SGLangEngine)
    assert engine.url == "http://127.0.0.1:1"
    assert engine._server is None


def test_the_slots_are_shared_by_the_servers(tiny_qwen3, tmp_path):
    pool = make(tiny_qwen3, tmp_path, servers=2, slots=33, python="/sglang/python", arguments=["--log-requests"])
    assert isinstance(pool, EnginePool)
    for i, member in enumerate(pool._members):
        process = member.engine._server
        arguments = process._arguments(30000)
        assert arguments[arguments.index("--max-running-requests") + 1] == "17"
        assert arguments[-1] == "--log-requests"
        assert process._log_path == tmp_path / f"sglang-{i}.log"
