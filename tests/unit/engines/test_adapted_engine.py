"""The embedded engine with an adapter beside its layers: the contract, and what deterministic promises."""

import asyncio

import pytest
import torch
from engine_contract import WeightContract

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.torch_engine import TorchEngine
from sparring.backend.lora import adapted_layers
from sparring.config import LoraConfig

LORA = LoraConfig(rank=4, target_modules=["q_proj", "o_proj", "down_proj"])


def adapter_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for name in adapted_layers(model, LORA):
        outputs, inputs = model.get_submodule(name).weight.shape
        tensors.append((f"{name}.lora_A.weight", torch.randn(LORA.rank, inputs, generator=generator) * 0.2))
        tensors.append((f"{name}.lora_B.weight", torch.randn(outputs, LORA.rank, generator=generator) * 0.2))
    return tensors


class TestAnEngineWithAnAdapterKeepsTheContract(WeightContract):
    @pytest.fixture
    def make_engine(self, make_model):
        knobs = {"slots": 4, "max_length": self.max_length, "dtype": "float32", "device": "cpu"}
        return lambda: TorchEngine(make_model(), **knobs, lora=LORA)

    @pytest.fixture
    def weights(self, make_model):
        return lambda: adapter_of(make_model(), seed=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_neighbours_change_no_bit_of_a_deterministic_request(make_model, dtype):
    async def play(others):
        model, knobs = make_model(), {"slots": 4, "max_length": 96, "dtype": dtype, "device": "cpu"}
        engine = TorchEngine(model, **knobs, deterministic=True, lora=LORA)
        await engine.start()
        try:
            await engine.update_weights(1, adapter_of(model, seed=0))
            noise = [
                asyncio.create_task(engine.generate([90 - n] * 35, SamplingParams(max_new_tokens=30, seed=n)))
                for n in range(others)
            ]
            completion = await engine.generate(range(40), SamplingParams(max_new_tokens=20, seed=5))
            await asyncio.gather(*noise)
            return completion
        finally:
            await engine.stop()

    assert await play(0) == await play(3)
