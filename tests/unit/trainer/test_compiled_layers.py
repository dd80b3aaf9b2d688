import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sparring.backend.trainer.compiled import compile_ahead, compile_layers
from sparring.backend.trainer.head import install_head
from sparring.backend.trainer.packing import Sample, pack


def make_model():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    install_head(model, torch.float32)
    return model


def samples(seed, n, prompt):
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 96, prompt)
    for i in range(n):
        tokens = np.concatenate([shared, rng.integers(0, 96, rng.integers(5, 30))])
        size = len(tokens)
        yield Sample(
            tokens, np.arange(size) >= prompt, np.zeros(size, np.float32), np.ones(size), np.zeros(size, np.int32),
            np.ones(size, np.float32), index=i,
        )  # fmt: skip


@pytest.mark.slow
def test_compiled_layers_give_the_same_gradients_for_rows_of_any_length_without_compiling_anew():
    plain, compiled = make_model(), make_model()
    compile_layers(compiled, backend="aot_eager")  # the same graphs as inductor's, without its compiler
    torch._dynamo.reset()
    compile_ahead(compiled, "cpu", token_budget=400)
    assert all(p.grad is None for p in compiled.parameters())
    graphs, blocks = [torch._dynamo.utils.counters["stats"]["unique_graphs"]], set()
    for seed, prompt in enumerate((20, 400, 900)):
        row = pack(list(samples(seed, 3 + 5 * seed, prompt)))
        blocks.add(len(row.layout.blocks))
        for model in (plain, compiled):
            model.zero_grad()
            model(row=row).logprobs.sum().backward()
        ours, theirs = (
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            for model in (compiled, plain)
        )
        assert (ours - theirs).norm() / theirs.norm() < 1e-5
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(blocks) > 1
    assert graphs[0] == graphs[-1] > 0, "a row of another length was compiled for"
