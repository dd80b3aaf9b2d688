"""Sampling is exact in distribution, and reports the distribution that it sampled from."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.sampler import Sampler

sample = Sampler().draw  # one for all tests: its scratch memory must carry nothing over

FILTERS = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
]


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Log-probabilities of one row, by transformers' own filters in their order."""
    z = logits.double()[None] / params.temperature
    if params.top_k:
        z = TopKLogitsWarper(params.top_k)(None, z)
    if params.top_p < 1:
        z = TopPLogitsWarper(params.top_p)(None, z)
    if params.min_p:
        z = MinPLogitsWarper(params.min_p)(None, z)
    return z.log_softmax(-1)[0]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("vocabulary", [24, 31])  # one level, two levels of the cumulative sum
def test_draws_follow_the_distribution(filters, vocabulary):
    params = SamplingParams(**filters)
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(3)) * 1.5
    draws = 8_000
    uniforms = torch.rand(draws, generator=torch.Generator().manual_seed(4), dtype=torch.float64).tolist()
    drawn = sample(logits.expand(draws, -1), [params] * draws, uniforms)
    expected = reference(logits, params).exp()
    counts = torch.bincount(torch.tensor([draw.token for draw in drawn]), minlength=vocabulary)
    assert counts[expected == 0].sum() == 0
    likely = expected > 0
    assert chisquare(counts[likely].numpy(), (expected[likely] / expected.sum() * draws).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("vocabulary", [24, 1000, 2048, 4093])  # the last is prime: no blocks
def test_the_logprob_is_that_of_the_full_distribution(filters, vocabulary):
    params = [SamplingParams(**filters), SamplingParams(), SamplingParams(**filters)]
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(5)) * 2
    for uniform in (0.0, 0.3, 0.999999, math.nextafter(1, 0)):
        for row, draw in enumerate(sample(logits, params, [uniform] * 3)):
            assert draw.logprob == pytest.approx(float(reference(logits[row], params[row])[draw.token]), abs=2e-5)


def test_a_nucleus_wider_than_the_sorted_head_is_whole():
    vocabulary = 4096
    params = SamplingParams(top_p=0.9)
    logits = torch.linspace(0, 0.1, vocabulary)
    kept = int((reference(logits, params) > -math.inf).sum())
    assert kept > 3000
    draws = sample(logits.expand(64, -1), [params] * 64, torch.linspace(0, 0.999, 64).tolist())
    assert min(draw.token for draw in draws) < vocabulary - kept + 100
    for draw in draws:
        assert draw.logprob == pytest.approx(float(reference(logits, params)[draw.token]), abs=1e-4)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from([-math.inf, -80.0, -3.0, 0.0, 2.0]), min_size=1, max_size=40).filter(
        lambda z: max(z) > -math.inf
    ),
    st.floats(0, 1, exclude_max=True),
)
def test_no_word_without_mass_is_ever_drawn(logits, uniform):
    (draw,) = sample(torch.tensor([logits]), [SamplingParams()], [uniform])
    assert logits[draw.token] > -math.inf
    assert math.isfinite(draw.logprob)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=64), st.floats(0, 1, exclude_max=True))
def test_the_draw_is_the_inverse_of_the_cumulative_sum(logits, uniform):
    (draw,) = sample(torch.tensor([logits]), [SamplingParams()], [uniform])
    cumulative = torch.tensor(logits, dtype=torch.float64).softmax(-1).cumsum(-1)
    assert (float(cumulative[draw.token - 1]) if draw.token else 0) <= uniform + 1e-6
    assert uniform <= float(cumulative[draw.token]) + 1e-6


def test_temperature_zero_takes_the_best_and_reports_temperature_one():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(6))
    params = [SamplingParams(temperature=0, top_k=3), SamplingParams(temperature=0.5)]
    greedy, _ = sample(logits, params, [0.999, 0.5])
    assert greedy.token == int(logits[0].argmax())
    assert greedy.logprob == pytest.approx(float(logits[0].log_softmax(-1).max()), abs=1e-6)


def test_alternatives_are_the_most_probable_of_the_sampled_distribution():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    (draw,) = sample(logits, [SamplingParams(temperature=0.5, top_k=3, top_logprobs=2)], [0.0])
    expected = reference(logits[0], SamplingParams(temperature=0.5, top_k=3))
    assert draw.top is not None
    assert [token for token, _ in draw.top] == [1, 3]
    assert [logprob for _, logprob in draw.top] == pytest.approx([float(expected[1]), float(expected[3])], abs=1e-6)
