"""Tiny random models, and what a full forward pass says about what an engine sampled."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sparring.backend.engines.base import Completion

sys.path.insert(0, str(Path(__file__).parent))  # engine_contract, for whoever tests an engine
pytest.register_assert_rewrite("engine_contract")

VOCABULARY = 96
_ARCHITECTURES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


class _Characters:
    """A tokenizer of one printable character a token."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(32 + token) for token in ids)


@pytest.fixture(scope="session")
def make_model():
    def make(kind: str = "llama", seed: int = 0, tied: bool = True) -> PreTrainedModel:
        config, model = _ARCHITECTURES[kind]
        torch.manual_seed(seed)
        return model(
            config(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                max_position_embeddings=512,
                tie_word_embeddings=tied,
                initializer_range=0.3,  # logits far from uniform
            )
        ).eval()

    return make


@pytest.fixture
def characters() -> _Characters:
    return _Characters()


@pytest.fixture(scope="session")
def full_forward():
    """Log-probabilities of a completion's tokens, each under the weights of the version recorded for it.

    Keys and values come from the weights under which each token was fed: the prompt under the first version, and a
    sampled token under the version of the one after it.
    """

    @torch.inference_mode()
    def score(
        models: Mapping[int, PreTrainedModel], prompt: Sequence[int], completion: Completion, temperature: float = 1.0
    ) -> list[float]:
        cache = DynamicCache()
        scores = []
        feed = list(prompt)
        for token, version in zip(completion.token_ids, completion.policy_versions, strict=True):
            logits = models[version](torch.tensor([feed]), cache=cache, use_cache=True).logits[0, -1]
            scores.append(float(torch.log_softmax(logits.double() / temperature, -1)[token]))
            feed = [token]
        return scores

    return score
