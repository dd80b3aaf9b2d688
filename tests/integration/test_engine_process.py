"""The embedded engine in a process of its own: the contract, torn weights, and death on either side."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.process_engine import ProcessEngine
from sparring.errors import EngineError

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "engines"))
pytest.register_assert_rewrite("engine_contract")
from engine_contract import WeightContract  # noqa: E402

pytestmark = pytest.mark.slow


def make_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, initializer_range=0.3, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(path)
    return path


def make(folder: Path, **options) -> ProcessEngine:
    return ProcessEngine(folder, slots=4, max_length=256, dtype="float32", device="cpu", **options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(folder):
    engine = make(folder)
    await engine.start()
    yield engine
    await engine.stop()


@pytest.mark.asyncio(loop_scope="module")
class TestProcessEngineKeepsTheContract(WeightContract):
    """One process for all of it."""

    @pytest.fixture
    def engine(self, shared_engine):
        return shared_engine

    @pytest.fixture
    def make_engine(self, folder):
        return lambda: make(folder)

    @pytest.fixture
    def weights(self):
        return lambda: list(make_model(1).named_parameters())


async def test_no_token_is_sampled_from_torn_weights(folder):
    """Weights change as fast as they can under a running request; each token fits the version recorded for it."""
    models = {version: make_model(version) for version in range(9)}
    engine = make(folder, threads=1)
    await engine.start()
    try:
        prompt = list(range(30))
        request = asyncio.create_task(engine.generate(prompt, SamplingParams(max_new_tokens=220)))
        for version in range(1, 9):
            await engine.update_weights(version, models[version].named_parameters())
        completion = await request
    finally:
        await engine.stop()
    assert len(set(completion.policy_versions)) > 2
    cache, feed = DynamicCache(), prompt
    with torch.inference_mode():
        for token, logprob, version in zip(
            completion.token_ids, completion.logprobs, completion.policy_versions, strict=True
        ):
            logits = models[version](torch.tensor([feed]), cache=cache, use_cache=True).logits[0, -1]
            assert logprob == pytest.approx(float(logits.double().log_softmax(-1)[token]), abs=5e-5)
            feed = [token]


async def test_staged_weights_count_from_their_update_on_and_until_others_are_staged(folder):
    engine = make(folder)
    await engine.start()
    try:
        greedy = SamplingParams(max_new_tokens=8, temperature=0)
        before = await engine.generate([1, 2, 3], greedy)
        staged = await engine.stage_weights(1, make_model(1).named_parameters())
        meanwhile = await engine.generate([1, 2, 3], greedy)
        assert (meanwhile.token_ids, meanwhile.policy_versions) == (before.token_ids, [0] * 8)
        await engine.update_weights(1, staged)
        after = await engine.generate([1, 2, 3], greedy)
        assert (after.policy_versions, after.token_ids != before.token_ids) == ([1] * 8, True)
        staged = await engine.stage_weights(2, make_model(2).named_parameters())
        await engine.stage_weights(3, make_model(3).named_parameters())
        with pytest.raises(EngineError, match="stage them again"):
            await engine.update_weights(2, staged)
    finally:
        await engine.stop()


async def test_a_dead_child_fails_what_is_pending_and_says_how_it_died(folder):
    engine = make(folder)
    await engine.start()
    await engine.pause()
    pending = asyncio.create_task(engine.generate([1, 2, 3], SamplingParams()))
    await asyncio.sleep(0)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        with pytest.raises(EngineError, match="exit code -9, SIGKILL"):
            await pending
    with pytest.raises(EngineError, match="SIGKILL"):
        await engine.health()
    with pytest.raises(EngineError, match="SIGKILL"):
        await engine.update_weights(1, [])
    await engine.stop()


async def test_the_child_dies_with_its_parent(folder):
    program = f"""
import asyncio
from sparring.backend.engines.process_engine import ProcessEngine

async def main():
    engine = ProcessEngine({str(folder)!r}, slots=2, max_length=64, device="cpu")
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    deadline = time.monotonic() + 10
    while _alive(child):
        assert time.monotonic() < deadline, f"process {child} outlived its parent"
        await asyncio.sleep(0.05)


async def test_a_folder_without_a_model_is_an_error_of_the_start(tmp_path):
    with pytest.raises(EngineError, match="cannot load"):
        await make(tmp_path).start()


async def test_a_start_has_a_deadline(folder):
    engine = make(folder, start_timeout_s=0.05)
    with pytest.raises(EngineError, match="start_timeout_s"):
        await engine.start()
    assert engine.pid is None


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
