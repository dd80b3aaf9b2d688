"""objectives.md, test 7: the engine's log-probabilities are the trainer's. And the supervised warm start."""

import asyncio

import numpy as np
import pytest
import torch

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.torch_engine import TorchEngine
from sparring.backend.trainer.policy import load_policy
from sparring.backend.trainer.probe import probe
from sparring.backend.trainer.warm_start import warm_start
from sparring.errors import TrainerError
from sparring.types import TokenSequence, Turn


async def sample(model, temperature, prompts=4):
    """Two turns of each of a few conversations, sampled by the embedded engine."""
    engine = TorchEngine(model, slots=8, max_length=200, dtype="float32")
    await engine.start()
    rng = np.random.default_rng(0)

    async def converse(prompt):
        ids, mask, logprobs, turns = list(prompt), [False] * len(prompt), [0.0] * len(prompt), []
        for _ in range(2):
            got = await engine.generate(ids, SamplingParams(max_new_tokens=12, temperature=temperature))
            turns.append(Turn(len(ids), len(ids) + len(got.token_ids), temperature=temperature))
            tool = rng.integers(0, 250, 5).tolist()
            ids += got.token_ids + tool
            mask += [True] * len(got.token_ids) + [False] * 5
            logprobs += got.logprobs + [0.0] * 5
        return TokenSequence(ids, mask, logprobs, np.where(mask, 0, -1), tuple(turns))

    try:
        return await asyncio.gather(*(converse(rng.integers(0, 250, 20)) for _ in range(prompts)))
    finally:
        await engine.stop()


@pytest.mark.slow
async def test_objectives_7_the_engines_logprobs_are_the_trainers(tiny_qwen3, kit):
    sequences = await asyncio.wait_for(sample(tiny_qwen3, 0.7), 60)
    model, _ = load_policy(tiny_qwen3, torch.float32)
    report = probe(model, sequences, kit.make_config(token_budget=200))
    assert report.tokens == sum(int(s.action_mask.sum()) for s in sequences) == 96
    assert report.mean < 1e-4


def test_a_wrong_temperature_is_refused_with_likely_causes(tiny_qwen3, kit):
    model, _ = load_policy(tiny_qwen3, torch.float32)
    sequence = kit.make_sequence(np.random.default_rng(0), np.arange(10))
    with pytest.raises(TrainerError, match=r"disagree.*limit 0.001.*temperature.*weights.*template"):
        probe(model, [sequence], kit.make_config())


def test_the_limit_follows_the_compute_type_unless_it_is_set(tiny_qwen3, kit):
    model, _ = load_policy(tiny_qwen3, torch.float32)
    sequence = kit.make_sequence(np.random.default_rng(0), np.arange(10))
    report = probe(model, [sequence], kit.make_config(max_logprob_drift=50.0))
    assert 0.1 < report.mean <= report.max
    with pytest.raises(TrainerError, match=r"limit 0.1 "):
        probe(model, [sequence], kit.make_config(dtype="bfloat16"))


def test_a_probe_without_tokens_is_refused(tiny_qwen3, kit):
    model, _ = load_policy(tiny_qwen3, torch.float32)
    with pytest.raises(TrainerError, match="no sampled token"):
        probe(model, [], kit.make_config())


def test_a_warm_start_learns_its_demonstrations_and_repeats(tiny_qwen3, kit):
    rng = np.random.default_rng(0)
    sequences = [kit.make_sequence(rng, rng.integers(0, 250, 6)) for _ in range(4)]
    runs = []
    for _ in range(2):
        model, _ = load_policy(tiny_qwen3, torch.float32)
        runs.append(warm_start(model, sequences, steps=20, lr=5e-3, batch_size=4, token_budget=60))
    assert runs[0] == runs[1]
    assert runs[0][0] == pytest.approx(np.log(262), abs=0.3)
    assert runs[0][-1] < 2.0


def test_a_warm_start_without_demonstrations_is_refused(tiny_qwen3):
    model, _ = load_policy(tiny_qwen3, torch.float32)
    with pytest.raises(TrainerError, match="no sequence has an action token"):
        warm_start(model, [], steps=1, lr=1e-3, batch_size=4)
