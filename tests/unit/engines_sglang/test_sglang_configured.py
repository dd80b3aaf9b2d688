from pathlib import Path

import pytest

from sparring.backend.engines.configured import make_remote
from sparring.backend.engines.remote.pool import EnginePool
from sparring.backend.engines.sglang import SGLangEngine
from sparring.backend.engines.sglang.options import WeightOptions
from sparring.config import (
    EngineConfig,
    EnvConfig,
    EvalConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)


def make(model: Path, logs: Path, **engine):
    config = RunConfig(
        model=ModelConfig(path=str(model)),
        env=EnvConfig(id="sparring/GSM8K-v0"),
        engine=EngineConfig(type="sglang", **engine),
        rollout=RolloutConfig(staleness=0),
        eval=EvalConfig(during_training="stall"),
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


def test_a_server_s_arguments_are_what_the_run_needs_of_it(tiny_qwen3, tmp_path):
    plain = make(tiny_qwen3, tmp_path)._server._arguments(1)
    assert not {"--enable-memory-saver", "--enable-lora"} & set(plain)
    lends = make(tiny_qwen3, tmp_path, release_memory=True)._server._arguments(1)
    assert "--enable-memory-saver" in lends


def test_a_server_for_an_adapter_knows_its_rank_and_layers(tiny_qwen3, tmp_path):
    config = RunConfig(
        model=ModelConfig(path=str(tiny_qwen3)),
        env=EnvConfig(id="sparring/GSM8K-v0"),
        engine=EngineConfig(type="sglang", lora="adapter"),
        trainer=TrainerConfig(lora=LoraConfig(rank=4)),
    )
    engine = make_remote(config, tiny_qwen3, tmp_path, lora=config.trainer.lora)
    arguments = engine._server._arguments(1)
    assert arguments[arguments.index("--max-lora-rank") + 1] == "4"
    modules = arguments[arguments.index("--lora-target-modules") + 1 :]
    assert modules == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def test_what_is_said_of_weights_reaches_the_engine(tiny_qwen3, tmp_path):
    knobs = {"weights": "group", "bucket_mib": 7, "verify_weights": 3, "group_host": "10.0.0.1"}
    options = make(tiny_qwen3, tmp_path, **knobs)._options
    assert options == WeightOptions("group", 7 * 2**20, 3, "10.0.0.1")
    assert make(tiny_qwen3, tmp_path)._options == WeightOptions()
