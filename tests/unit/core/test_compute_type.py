"""What `auto` computes in: by the device, and on a processor by how slow it is in bfloat16."""

import pytest
import torch

from sparring.backend.compute_type import bfloat16_slowdown, settle_dtypes
from sparring.config_file import make_config

DOCUMENT = {"model": {"path": "m"}, "env": {"id": "x"}}


@pytest.fixture
def settle(monkeypatch):
    """The engine's and the trainer's type on a machine, and the lines that were told."""

    def _settle(*overrides, gpu=False, slowdown=27.3, of=("engine", "trainer")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr("sparring.backend.compute_type.bfloat16_slowdown", lambda: slowdown)
        lines = []
        config = settle_dtypes(make_config(DOCUMENT, overrides, name="x").config, lines.append, of=of)
        assert settle_dtypes(config, lines.append, of=of) == config
        return config.engine.dtype, config.trainer.dtype, lines

    return _settle


def test_auto_is_the_default():
    config = make_config(DOCUMENT, name="x").config
    assert (config.engine.dtype, config.trainer.dtype) == ("auto", "auto")


@pytest.mark.parametrize(("slowdown", "expected"), [(0.3, "bfloat16"), (1.2, "bfloat16"), (4.2, "float32")])
def test_a_processor_that_is_slow_in_bfloat16_computes_in_float32(settle, slowdown, expected):
    engine, trainer, lines = settle(slowdown=slowdown)
    assert (engine, trainer) == (expected, expected)
    assert len(lines) == (expected == "float32")


def test_a_gpu_computes_in_bfloat16_whatever_its_processor(settle):
    assert settle(gpu=True) == ("bfloat16", "bfloat16", [])
    engine, trainer, lines = settle("trainer.device=cpu", gpu=True)
    assert (engine, trainer) == ("bfloat16", "float32")
    assert lines == ["trainer.dtype: float32, as this processor is slow in bfloat16 (27 times the time)"]


@pytest.mark.parametrize("server", ["sglang", "vllm"])
def test_servers_compute_in_bfloat16(settle, server):
    assert settle(f"engine.type={server}")[:2] == ("bfloat16", "float32")


def test_a_type_that_was_given_stands(settle):
    assert settle("engine.dtype=bfloat16", "trainer.dtype=bfloat16") == ("bfloat16", "bfloat16", [])
    assert settle("engine.dtype=float32", slowdown=0.3) == ("float32", "bfloat16", [])


@pytest.mark.parametrize("section", ["engine", "trainer"])
def test_who_computes_by_one_section_settles_that_one(settle, section):
    engine, trainer, lines = settle(of=[section])
    assert {engine, trainer} == {"float32", "auto"}
    assert [line.partition(":")[0] for line in lines] == [f"{section}.dtype"]


def test_the_processor_is_asked_by_a_product_that_leaves_torch_as_it_was():
    threads = torch.get_num_threads()
    assert 0 < bfloat16_slowdown() < 1000
    assert torch.get_num_threads() == threads
