"""On the real model: objectives.md, test 1 at 1e-5, and that bfloat16 scores stay near float32's."""

import numpy as np
import pytest
import torch

from sparring.backend.trainer.packing import Sample, pack
from sparring.backend.trainer.policy import load_policy

pytestmark = [pytest.mark.model, pytest.mark.slow]


def make_samples(n: int = 4, prompt: int = 40, own: int = 8) -> list[Sample]:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 49152, prompt)
    length = prompt + own
    mask = np.arange(length) >= prompt
    return [
        Sample(
            np.concatenate([shared, rng.integers(0, 49152, own)]), mask, np.zeros(length, np.float32),
            np.full(length, rng.normal()), np.zeros(length, np.int32), np.full(length, 0.7, np.float32), i,
        )
        for i in range(n)
    ]  # fmt: skip


def test_objectives_1_tree_packed_is_unpacked_on_smollm2(smollm2):
    torch.set_num_threads(1)
    model, _ = load_policy(smollm2, torch.float32)
    samples = make_samples()
    results = []
    for rows in ([pack([s]) for s in samples], [pack(samples)]):
        model.zero_grad()
        total = 0.0
        for row in rows:
            loss = -(model(row=row).logprobs * row.advantages).sum() / 32
            loss.backward()
            total += loss.item()
        results.append((total, {name: p.grad.clone() for name, p in model.named_parameters()}))
    (alone, expected), (tree, gradients) = results
    assert tree == pytest.approx(alone, rel=1e-5)
    largest = max(g.abs().max() for g in expected.values())
    assert max((gradients[n] - g).abs().max() for n, g in expected.items()) <= 1e-5 * largest


def test_bfloat16_scores_stay_near_float32s(smollm2):
    torch.set_num_threads(1)
    row = pack(make_samples())
    scores = []
    for dtype in (torch.float32, torch.bfloat16):
        model, _ = load_policy(smollm2, dtype)
        with torch.no_grad():
            scores.append(model(row=row).logprobs)
    assert (scores[0] - scores[1]).abs().mean() < 0.1
