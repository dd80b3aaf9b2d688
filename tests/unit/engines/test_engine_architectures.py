"""What the embedded engine cannot run, it refuses by name before it starts; what it can, it runs as the model would."""

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from sparring.backend.engines.slot_model import SlotModel
from sparring.errors import EngineError

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
REFUSED = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=16)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, sliding_window=16)),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SMALL, sliding_window=256, num_local_experts=2, num_experts_per_tok=1, rope_parameters=None)
    ),
    "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4)),
    "mamba": lambda: MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ),
}
ACCEPTED = {
    "mistral with a window beyond the context": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=64)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4)),
}


def load(model, max_length=64, dtype=torch.float32) -> SlotModel:
    torch.manual_seed(0)
    return SlotModel(model, slots=2, rows=2, max_length=max_length, dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("kind", REFUSED)
def test_an_attention_that_is_more_than_a_mask_is_refused_by_name(kind):
    with pytest.raises(EngineError, match=f"{kind}.*sglang"):
        load(REFUSED[kind]())


@pytest.mark.parametrize("kind", ACCEPTED)
def test_others_pass_the_probe_at_the_start(kind):
    assert load(ACCEPTED[kind]()).cache.keys.shape[0] == 2


@pytest.mark.parametrize("from_folder", [True, False])
def test_rotary_frequencies_stay_float32(make_model, tmp_path, from_folder):
    """In bfloat16 they are off by radians at position 400."""
    model = make_model()
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path if from_folder else model, dtype=torch.bfloat16)._model
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in loaded.buffers()} == {torch.float32}


def test_a_context_beyond_the_model_s_is_an_error(make_model):
    with pytest.raises(EngineError, match="512"):
        load(make_model(), max_length=513)


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(EngineError, match="cannot load"):
        load(tmp_path / "nothing")
