"""The engine contract over SGLang's endpoints: against the stand-in, and on a GPU against SGLang itself.

Where `SPARRING_SGLANG_PYTHON` names the Python of an environment with SGLang (and `SPARRING_SGLANG_PATH` its
PYTHONPATH, if it needs one), the server is the real one. A server takes minutes to start there, so all tests share it.
"""

import asyncio
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.fake_sglang import FakeSGLang
from sparring.backend.engines.sglang import ServerOptions, SGLangEngine, SGLangServer
from sparring.backend.engines.sglang.options import WeightOptions
from sparring.backend.engines.torch_engine import TorchEngine
from sparring.backend.lora import adapted_layers
from sparring.config import LoraConfig
from sparring.errors import EngineError

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "engines"))
pytest.register_assert_rewrite("engine_contract", "remote_contract")
from remote_contract import RemoteContract, make_model, random_model  # noqa: E402

REAL = os.environ.get("SPARRING_SGLANG_PYTHON")
DEVICE = "cuda" if REAL else "cpu"
LORA = LoraConfig(rank=8, alpha=16, target_modules=["q_proj", "down_proj"])
PROMPT, PIECES = [5, 6, 7, 8], 2**18  # bytes: the model has 1.2 MB

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_model(DEVICE).save_pretrained(path)
    return path


@asynccontextmanager
async def server(folder: Path, *, reports_versions: bool, seeds: bool, log: Path, lora: LoraConfig | None = None):
    """The URL of a server that holds the model in `folder`. One with adapters can lend its memory too."""
    if REAL is None:
        torch_engine = TorchEngine(folder, slots=8, max_length=256, dtype="bfloat16", device="cpu", lora=lora)
        async with FakeSGLang(torch_engine, folder, reports_versions=reports_versions, seeds=seeds).serve() as url:
            yield url
        return
    options = ServerOptions(
        python=REAL,
        memory_fraction=0.3,
        max_running=64,
        deterministic=seeds,
        lora=lora,
        memory_saver=lora is not None,
        extra=("--skip-tokenizer-init",),
        environment={"PYTHONPATH": os.environ.get("SPARRING_SGLANG_PATH", "")},
    )
    plain = None if reports_versions else (REAL, "-m", "sglang.launch_server")
    process = SGLangServer(folder, options, max_length=256, log_path=log, command=plain)
    try:
        yield await process.start()
    finally:
        await process.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["hooked", "plain"])
async def url(request, folder, tmp_path_factory):
    hooked = request.param == "hooked"
    log = tmp_path_factory.mktemp("log") / "sglang.log"
    async with server(folder, reports_versions=hooked, seeds=True, log=log) as address:
        yield address


class TestSGLangKeepsTheContract(RemoteContract):
    device = DEVICE

    @pytest.fixture
    def make_engine(self, folder, url):
        return lambda: SGLangEngine(folder, url=url, max_length=self.max_length)


async def test_a_model_that_is_no_folder_is_said_before_anything_starts(tmp_path):
    with pytest.raises(EngineError, match="is no model folder"):
        SGLangEngine(tmp_path, url="http://127.0.0.1:1", max_length=16)


def logprobs_of(model, prompt, answer):
    """Of each token of the answer, as Transformers has them."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]], device=DEVICE)).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1)[range(len(answer)), answer].tolist()


async def assert_sampled_from(engine, model, *others):
    """What it samples now has the log-probabilities that this model gives it, and no other."""
    found = await engine.generate(PROMPT, SamplingParams(max_new_tokens=40))
    assert set(found.policy_versions) == {engine.version}

    def apart(judge):
        pairs = zip(found.logprobs, logprobs_of(judge, PROMPT, found.token_ids), strict=True)
        return sum(abs(a - b) for a, b in pairs) / len(found.token_ids)

    assert apart(model) < 0.05  # bfloat16 on both sides
    for other in others:
        assert apart(other) > 0.3


class TestEveryWayOfNewWeights:
    device = DEVICE

    @pytest_asyncio.fixture(loop_scope="module", params=["whole", "pieces", "folder"])
    async def engine(self, request, folder, url):
        way = {"whole": {}, "pieces": {"bucket_bytes": PIECES}, "folder": {"route": "disk"}}[request.param]
        engine = SGLangEngine(folder, url=url, max_length=256, weights=WeightOptions(verify_every=1, **way))
        await engine.start()
        yield engine
        await engine.stop()

    async def test_the_server_samples_from_what_it_was_sent(self, engine):
        models = [make_model(seed, DEVICE) for seed in (1, 2)]
        for model, other in (models, reversed(models)):
            await engine.publish(engine.version + 1, model.named_parameters())
            await assert_sampled_from(engine, model, other)
            await engine.verify_weights()

    test_each_token_s_version = RemoteContract.test_each_token_s_version_is_that_of_the_weights_that_sampled_it

    async def test_weights_that_lack_one_are_refused_and_the_next_repair_it(self, engine):
        model = make_model(1, DEVICE)
        with pytest.raises(EngineError, match="missing"):
            await engine.publish(engine.version + 1, list(model.named_parameters())[:-1])
        await engine.resume()
        await engine.publish(engine.version + 1, model.named_parameters())
        await assert_sampled_from(engine, model)


async def test_another_architecture_on_the_server_is_said(url, tmp_path):
    config = LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    engine = SGLangEngine(tmp_path, url=url, max_length=64)
    with pytest.raises(EngineError, match=r"holds Qwen3ForCausalLM .*this run is LlamaForCausalLM"):
        await engine.start()
    await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapting(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "sglang.log"
    async with server(folder, reports_versions=True, seeds=False, log=log, lora=LORA) as address:
        yield address


@pytest_asyncio.fixture(loop_scope="module")
async def with_adapters(folder, adapting):
    engine = SGLangEngine(folder, url=adapting, max_length=256, lora=LORA)
    await engine.start()
    yield engine
    await engine.stop()


def adapted(folder, seed):
    """The tensors of an adapter, and the model with it merged in."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE).eval()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in adapted_layers(model, LORA):
        weight = model.get_submodule(name).weight
        a = torch.randn(LORA.rank, weight.shape[1], generator=generator) * 0.2
        b = torch.randn(weight.shape[0], LORA.rank, generator=generator) * 0.2
        tensors |= {f"{name}.lora_A.weight": a.to(DEVICE), f"{name}.lora_B.weight": b.to(DEVICE)}
        weight.data += (LORA.alpha / LORA.rank * (b @ a)).to(weight)
    return tensors, model


async def test_each_version_is_sampled_with_its_own_adapter(with_adapters, folder):
    base = random_model(DEVICE)
    await assert_sampled_from(with_adapters, base)
    (first, first_model), (second, second_model) = adapted(folder, 1), adapted(folder, 2)
    await with_adapters.publish(1, first.items())
    await assert_sampled_from(with_adapters, first_model, base, second_model)
    asked = asyncio.create_task(with_adapters.generate(PROMPT, SamplingParams(max_new_tokens=230)))
    await asyncio.sleep(0.1)
    await with_adapters.publish(2, second.items())
    completion = await asked
    assert len(completion.token_ids) == 230
    split = completion.policy_versions.count(1)
    assert completion.policy_versions == [1] * split + [2] * (230 - split)
    for model, part in ((first_model, slice(0, split)), (second_model, slice(split, None))):
        expected = logprobs_of(model, PROMPT, completion.token_ids)[part]
        pairs = list(zip(completion.logprobs[part], expected, strict=True))
        assert not pairs or sum(abs(a - b) for a, b in pairs) / len(pairs) < 0.05
    await assert_sampled_from(with_adapters, second_model, base, first_model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lending(folder, adapting, tmp_path_factory):
    """The same server, to be spared another start; the stand-in for adapters takes no other weights."""
    if REAL:
        yield adapting
        return
    log = tmp_path_factory.mktemp("log") / "sglang.log"
    async with server(folder, reports_versions=True, seeds=False, log=log) as address:
        yield address


async def test_lent_memory_is_free_for_others_until_the_next_weights(folder, lending):
    engine = SGLangEngine(folder, url=lending, max_length=256)
    await engine.start()
    before = torch.cuda.mem_get_info()[0] if REAL else 0
    await engine.release_memory()
    if REAL:
        assert torch.cuda.mem_get_info()[0] - before > 2**22  # 64 requests of 256 tokens have 16 MiB of cache
    model = make_model(3, DEVICE)
    await engine.publish(1, model.named_parameters())
    await assert_sampled_from(engine, model, random_model(DEVICE))
    await engine.stop()


if REAL:  # what only a GPU can show

    async def test_a_gpu_with_too_little_memory_is_said_before_anything_loads(folder, tmp_path):
        options = ServerOptions(python=REAL, memory_fraction=0.995, max_running=4)
        held = torch.empty(4 * 2**30, dtype=torch.uint8, device="cuda")
        with pytest.raises(EngineError, match=r"0\.995 is \d+\.\d GiB, but GPU 0 has \d+\.\d of \d+ GiB free"):
            async with asyncio.timeout(20):
                await SGLangServer(folder, options, max_length=64, log_path=tmp_path / "log").start()
        del held

    async def test_nothing_piles_up_over_a_thousand_updates(folder, adapting):
        """A buffer that was shared for 63 updates of 310 tensors crashed its process as it was freed."""
        engine = SGLangEngine(folder, url=adapting, max_length=256)
        await engine.start()
        model = make_model(4, DEVICE)
        for version in range(1, 1001):
            await engine.publish(version, model.named_parameters())
        await assert_sampled_from(engine, model, random_model(DEVICE))
        await engine.stop()
