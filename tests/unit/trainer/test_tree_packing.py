"""objectives.md, test 1: packed = unpacked = tree-packed, in loss and in every gradient."""

from dataclasses import replace
from itertools import combinations, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from sparring.backend.trainer import attention
from sparring.backend.trainer.attention import TreeLayout
from sparring.backend.trainer.packing import Sample, pack, split_rows
from sparring.errors import TrainerError


def loss_and_gradients(model, rows):
    model.zero_grad()
    total = 0.0
    for row in rows:
        scores = model(row=row)
        loss = -(scores.logprobs * row.advantages).sum() / 100
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(one, other, relative):
    (loss, gradients), (other_loss, other_gradients) = one, other
    assert loss == pytest.approx(other_loss, rel=relative)
    largest = max(g.abs().max() for g in other_gradients.values())
    worst = max((gradients[n] - g).abs().max() for n, g in other_gradients.items())
    assert worst <= relative * largest


def test_objectives_1_packed_is_unpacked_is_tree_packed_in_float64(policy, kit):
    samples = kit.make_samples(groups=3)
    alone = loss_and_gradients(policy, [pack([s]) for s in samples])
    assert_equal(loss_and_gradients(policy, [pack(samples, share=False)]), alone, 1e-10)
    assert_equal(loss_and_gradients(policy, [pack(samples)]), alone, 1e-10)


def test_objectives_1_packed_is_unpacked_is_tree_packed_in_float32(tiny_qwen3, kit):
    from sparring.backend.trainer.policy import load_policy

    model, _ = load_policy(tiny_qwen3, torch.float32)
    samples = kit.make_samples(groups=3)
    alone = loss_and_gradients(model, [pack([s]) for s in samples])
    assert_equal(loss_and_gradients(model, [pack(samples, share=False)]), alone, 1e-6)
    assert_equal(loss_and_gradients(model, [pack(samples)]), alone, 1e-6)


def test_scores_are_those_of_transformers_own_forward(policy, tiny_qwen3, kit):
    """An independent implementation: full logits, no packing, no code of ours but the sample itself."""
    reference = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float64)  # its norms round to float32
    samples = kit.make_samples()
    row = pack(samples)
    scores = policy(row=row)
    for local, index in enumerate(row.sample_index.tolist()):
        sample = samples[index]
        logits = reference(torch.tensor(sample.token_ids)[None]).logits[0, :-1]
        logits = logits / torch.tensor(sample.temperatures[1:], dtype=torch.float64)[:, None]
        expected = logits.log_softmax(-1)
        actions = np.flatnonzero(sample.action_mask)
        picked = expected[actions - 1, sample.token_ids[actions]]
        terms = row.sequence == local
        torch.testing.assert_close(scores.logprobs[terms], picked, rtol=0, atol=1e-6)
        entropy = -(expected.exp() * expected).sum(-1)[actions - 1]
        torch.testing.assert_close(scores.entropy[row.term_row][terms], entropy, rtol=0, atol=1e-6)


def test_what_sequences_share_is_forwarded_and_scored_once(kit):
    samples = kit.make_samples(groups=1, size=8)
    twins = [Sample(**{**vars(samples[0]), "index": i}) for i in range(8)]
    row = pack(twins)
    assert row.tokens == len(twins[0].context)
    assert row.unpacked_tokens == 8 * row.tokens
    assert len(row.targets) == 8 * len(row.scored)


@st.composite
def forests(draw):
    """Sequences over two tokens: prefixes shared in every way, twins and prefixes of one another included."""
    bodies = draw(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=9), min_size=1, max_size=7))
    return [_sample(np.array(body), i) for i, body in enumerate(bodies)]


def _sample(ids: np.ndarray, index: int) -> Sample:
    n = len(ids)
    mask = np.arange(n) >= 1
    zeros = np.zeros(n)
    return Sample(ids, mask, zeros.astype(np.float32), zeros, zeros.astype(np.int32), np.ones(n, np.float32), index)


@given(forests(), st.sampled_from([None, 3]), st.sampled_from([1 << 16, 12]))
@settings(deadline=None, max_examples=100)
def test_every_token_attends_to_its_own_path_and_to_nothing_else(samples, window, long):
    row = pack(samples, sliding_window=window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_LONG", long)
        assert row.layout.blocks  # worked out here, and kept
    seen: dict[int, set[int]] = {}
    for block in row.layout.blocks:
        mask = block.mask
        if mask is None:
            n, k = block.queries.shape[1], block.keys.shape[1]
            mask = torch.ones(n, k, dtype=torch.bool).tril(k - n).expand(len(block.queries), 1, n, k)
        flat = 0
        for b, queries in enumerate(block.queries.tolist()):
            for q, position in enumerate(queries):
                flat += 1
                seen.setdefault(position, set())
                if (row.layout.restore == _offset(row, block) + b * len(queries) + q).any():
                    seen[position] = set(block.keys[b][mask[b, 0, q]].tolist())
    prefixes = {}  # packed position -> the tokens from the root to it
    for position in range(row.tokens):
        path = sorted(seen[position], key=lambda p: int(row.position_ids[p]))
        depth = int(row.position_ids[position])
        first = 0 if window is None else max(0, depth - window + 1)
        assert [int(row.position_ids[p]) for p in path] == list(range(first, depth + 1))
        prefixes[position] = tuple(row.input_ids[path].tolist())
    if window is None:
        expected = {tuple(s.context[:n].tolist()) for s in samples for n in range(1, len(s.context) + 1)}
        assert sorted(prefixes.values()) == sorted(expected)  # every prefix once


def _offset(row, block):
    before = row.layout.blocks[: row.layout.blocks.index(block)]
    return sum(b.queries.numel() for b in before)


def test_a_window_as_long_as_the_sequence_changes_nothing():
    paths = [np.arange(5), np.array([0, 1, 5, 6, 7])]
    plain, windowed = TreeLayout(paths, [5, 3]), TreeLayout(paths, [5, 3], sliding_window=5)
    assert torch.equal(plain.restore, windowed.restore)


@given(st.integers(20, 200), st.integers(1, 4), st.integers(0, 5))
@settings(deadline=None, max_examples=30)
def test_rows_keep_to_the_budget_and_lose_nothing(budget, ranks, seed):
    rng = np.random.default_rng(seed)
    samples = [_sample(rng.integers(0, 3, rng.integers(3, 20)), i) for i in range(12)]
    rows = split_rows(samples, budget, at_least=ranks)
    assert sorted(s.index for row in rows for s in row) == list(range(12))
    assert len(rows) >= ranks
    for row in rows:
        packed = pack(row)
        assert packed.tokens <= budget
        assert len(packed.targets) <= budget


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_as_few_and_then_as_even_as_can_be(seed):
    rng = np.random.default_rng(seed)
    samples = [_sample(rng.integers(0, 3, rng.integers(3, 20)), i) for i in range(9)]
    rows = split_rows(samples, 40)
    ordered = [sample for row in rows for sample in row]
    packed = {(a, b): pack(ordered[a:b]) for a, b in combinations(range(len(ordered) + 1), 2)}
    sizes = {cut: max(row.tokens, len(row.targets)) for cut, row in packed.items()}

    def largest(cuts):
        return max(sizes[cut] for cut in pairwise([0, *cuts, len(ordered)]))

    assert all(largest(cuts) > 40 for cuts in combinations(range(1, len(ordered)), len(rows) - 2))
    best = min(largest(cuts) for cuts in combinations(range(1, len(ordered)), len(rows) - 1))
    assert largest(np.cumsum([len(row) for row in rows])[:-1]) == best


@pytest.mark.parametrize("ranks", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("budget", [10, 14, 100])
def test_ranks_get_no_more_rows_than_they_need(ranks, budget):
    """Answers of one token to one prompt: were a row below the prompt's length, each would be in one of its own."""
    samples = [replace(_sample(np.arange(11), i), action_mask=np.arange(11) == 10) for i in range(8)]
    rows = split_rows(samples, budget, at_least=ranks)
    assert [s.index for row in rows for s in row] == list(range(8))
    assert len(rows) == min(ranks, 8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"action_mask": np.zeros(4, bool)}, "episode e7.*without action tokens"),
        ({"action_mask": np.ones(4, bool)}, "episode e7.*first token is an action"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(change, says):
    sample = SimpleNamespace(**vars(_sample(np.array([1, 2, 3, 4]), 0)) | {"name": "e7"} | change)
    with pytest.raises(TrainerError, match=says):
        split_rows([Sample(**vars(sample))], 100)


def test_a_sequence_longer_than_the_budget_is_refused_by_name():
    sample = Sample(**vars(_sample(np.arange(50), 0)) | {"name": "e9"})
    with pytest.raises(TrainerError, match=r"episode e9 has 49 tokens.*token_budget=40"):
        split_rows([sample], 40)
