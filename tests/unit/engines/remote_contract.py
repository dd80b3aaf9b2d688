"""What engines on servers keep besides, with models whose tokens show by their log-probabilities what sampled them.

A server takes minutes to start on a GPU, so all tests share one, and an event loop with it.
"""

import asyncio
import math

import pytest
import pytest_asyncio
import torch
from engine_contract import WeightContract
from transformers import Qwen3Config, Qwen3ForCausalLM

from sparring.backend.engines.base import SamplingParams

VOCABULARY = 96


def make_model(seed: int, device: str) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, initializer_range=0.3,
        tie_word_embeddings=True, eos_token_id=VOCABULARY + 1,  # never sampled
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(device, torch.bfloat16).eval()


def random_model(device: str) -> Qwen3ForCausalLM:
    return make_model(0, device)


def uniform_model(device: str) -> Qwen3ForCausalLM:
    """Every token has probability 1 / VOCABULARY under it, whatever came before: its tokens can be told by that."""
    model = make_model(0, device)
    torch.nn.init.zeros_(model.model.norm.weight)
    return model


class RemoteContract(WeightContract):
    """Fixtures to give: `make_engine`, of an engine attached to a running server that holds `random_model`.

    Attributes:
        device: of the weights that updates bring.
    """

    device = "cpu"

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self, make_engine):
        engine = make_engine()
        await engine.start()
        yield engine
        await engine.resume()
        await engine.stop()

    @pytest.fixture
    def weights(self):
        return lambda: list(make_model(1, self.device).named_parameters())

    async def arrived(self, engine, seen):
        """A token that was sampled before the pause may still be on its way through the server."""
        before = -1
        async with asyncio.timeout(10):
            while before != len(seen):
                before = len(seen)
                for _ in range(20):
                    await engine.health()

    async def test_each_token_s_version_is_that_of_the_weights_that_sampled_it(self, engine):
        """Versions alternate between random weights and uniform ones, whose tokens all have logprob -ln V."""
        models = [list(make(self.device).named_parameters()) for make in (random_model, uniform_model)]
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
