"""The engine contract over SGLang's endpoints: against the stand-in, and on a GPU against SGLang itself.

Where `SPARRING_SGLANG_PYTHON` names the Python of an environment with SGLang (and `SPARRING_SGLANG_PATH` its
PYTHONPATH, if it needs one), the server is the real one. A server takes minutes to start there, so all tests share it.
"""

import asyncio
import math
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.fake_sglang import FakeSGLang
from sparring.backend.engines.sglang import ServerOptions, SGLangEngine, SGLangServer
from sparring.backend.engines.torch_engine import TorchEngine
from sparring.errors import EngineError

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "engines"))
pytest.register_assert_rewrite("engine_contract")
from engine_contract import WeightContract  # noqa: E402

REAL = os.environ.get("SPARRING_SGLANG_PYTHON")
DEVICE = "cuda" if REAL else "cpu"
VOCABULARY = 96

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(500)]


def make_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, initializer_range=0.3,
        tie_word_embeddings=True, eos_token_id=VOCABULARY + 1,  # never sampled
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(DEVICE, torch.bfloat16).eval()


def uniform_model() -> Qwen3ForCausalLM:
    """Every token has probability 1 / VOCABULARY under it, whatever came before: its tokens can be told by that."""
    model = make_model(0)
    torch.nn.init.zeros_(model.model.norm.weight)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(path)
    return path


@asynccontextmanager
async def server(folder: Path, *, reports_versions: bool, seeds: bool, log: Path):
    """The URL of a server that holds the model in `folder`."""
    if REAL is None:
        torch_engine = TorchEngine(folder, slots=8, max_length=256, dtype="bfloat16", device="cpu")
        async with FakeSGLang(torch_engine, folder, reports_versions=reports_versions, seeds=seeds).serve() as url:
            yield url
        return
    options = ServerOptions(
        python=REAL,
        memory_fraction=0.3,
        max_running=64,
        deterministic=seeds,
        extra=("--skip-tokenizer-init",),
        environment={"PYTHONPATH": os.environ.get("SPARRING_SGLANG_PATH", "")},
    )
    plain = None if reports_versions else (REAL, "-m", "sglang.launch_server")
    process = SGLangServer(folder, options, max_length=256, log_path=log, command=plain)
    yield await process.start()
    await process.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["hooked", "plain"])
async def url(request, folder, tmp_path_factory):
    hooked = request.param == "hooked"
    log = tmp_path_factory.mktemp("log") / "sglang.log"
    async with server(folder, reports_versions=hooked, seeds=True, log=log) as address:
        yield address


class TestSGLangKeepsTheContract(WeightContract):
    @pytest.fixture
    def make_engine(self, folder, url):
        return lambda: SGLangEngine(folder, url=url, max_length=self.max_length)

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self, make_engine):
        engine = make_engine()
        await engine.start()
        yield engine
        await engine.resume()
        await engine.stop()

    @pytest.fixture
    def weights(self):
        return lambda: list(make_model(1).named_parameters())

    async def test_a_pause_keeps_requests_and_resume_ends_them(self, engine):
        """As in the contract; but a token sampled before the pause may still be on its way through the server."""
        seen: list[int] = []
        begun = asyncio.Event()

        async def collect() -> None:
            async for chunk in engine.stream(self.prompt, SamplingParams(max_new_tokens=100)):
                seen.extend(chunk.token_ids)
                begun.set()

        request = asyncio.create_task(collect())
        await begun.wait()
        await engine.pause()
        late = asyncio.create_task(engine.generate(self.prompt, SamplingParams(max_new_tokens=2)))
        before = -1
        async with asyncio.timeout(10):
            while before != len(seen):
                before = len(seen)
                for _ in range(20):
                    await engine.health()
        assert 0 < len(seen) < 100
        assert not late.done()
        await engine.resume()
        async with asyncio.timeout(30):
            await request
            assert len((await late).token_ids) == 2
        assert len(seen) == 100

    async def test_each_token_s_version_is_that_of_the_weights_that_sampled_it(self, engine, folder):
        """Versions alternate between random weights and uniform ones, whose tokens all have logprob -ln V."""
        models = [list(make_model(0).named_parameters()), list(uniform_model().named_parameters())]
        first = engine.version
        await engine.publish(first + 1, models[1])
        base = engine.version
        requests = [
            asyncio.create_task(engine.generate([5, 6, 7, n], SamplingParams(max_new_tokens=150))) for n in range(8)
        ]
        for version in range(base + 1, base + 7):
            await asyncio.sleep(0.05)
            await engine.publish(version, models[(version - base + 1) % 2])
        completions = await asyncio.gather(*requests)
        seen = set()
        for completion in completions:
            assert len(completion.token_ids) == 150
            for logprob, version in zip(completion.logprobs, completion.policy_versions, strict=True):
                uniform = math.isclose(logprob, -math.log(VOCABULARY), abs_tol=2e-3)
                seen.add(version)
                if (version - base) % 2 == 0:
                    assert uniform, (version, logprob)
                # Exactly: random weights come within 2e-3 of it by chance, once in some thousand tokens.
                elif math.isclose(logprob, -math.log(VOCABULARY), abs_tol=2e-6):
                    pytest.fail(f"a token of version {version} has the uniform model's log-probability")
        assert len(seen) > 1
        await engine.publish(engine.version + 1, models[0])

    async def test_a_cut_distribution_reports_what_it_sampled_from(self, engine):
        two = SamplingParams(max_new_tokens=40, top_k=2)
        completion = await engine.generate([5, 6, 7], two)
        plain = await engine.generate([5, 6, 7], SamplingParams(max_new_tokens=1, temperature=0.0, top_logprobs=2))
        assert plain.top_logprobs is not None
        (first, p), (second, q) = sorted(plain.top_logprobs[0], key=lambda entry: -entry[1])
        mass = math.exp(p) + math.exp(q)
        assert mass < 0.8, "else the plain log-probability would pass too"
        expected = {first: p - math.log(mass), second: q - math.log(mass)}
        assert completion.logprobs[0] == pytest.approx(expected[completion.token_ids[0]], abs=0.1)  # bfloat16 logits

    async def test_many_requests_at_once_all_come_back(self, engine):
        completions = await asyncio.gather(
            *(engine.generate([n % 90, 6, 7], SamplingParams(max_new_tokens=20)) for n in range(64))
        )
        assert {len(completion.token_ids) for completion in completions} == {20}


async def test_a_model_that_is_no_folder_is_said_before_anything_starts(tmp_path):
    with pytest.raises(EngineError, match="is no model folder"):
        SGLangEngine(tmp_path, url="http://127.0.0.1:1", max_length=16)
