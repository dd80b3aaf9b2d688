"""objectives.md, test 2: any split into micro-batches gives the same gradient (ranks: test_trainer_ranks.py)."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from sparring.backend.objectives import load_objective
from sparring.backend.objectives.load import OBJECTIVES
from sparring.backend.trainer.accumulation import GradientAccumulation
from sparring.backend.trainer.clock import StepClock
from sparring.backend.trainer.critic import Critic
from sparring.backend.trainer.ranks import Ranks
from sparring.backend.trainer.step import make_step


def step_gradients(model, objective, groups, budget, ranks=Ranks):
    """What is accumulated over the rows, and the gradient by parameter."""
    model.zero_grad()
    critic = None
    if objective.critic is not None:
        torch.manual_seed(0)
        critic = Critic(objective.critic, None, 128, torch.device("cpu"))
        torch.nn.init.normal_(critic._head.weight, std=0.1)
    accelerator = Accelerator()
    accumulation = GradientAccumulation(
        objective,
        accelerator,
        ranks(accelerator, None),
        StepClock(),
        torch.device("cpu"),
        budget,
        reference=lambda row: SimpleNamespace(logprobs=row.behaviour_logprobs),
        critic=critic,
    )
    accumulated = accumulation.accumulate(model, make_step(groups, 0, objective), groups)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    if critic is not None:
        gradients["critic"] = critic._head.weight.grad.clone()
    return accumulated, gradients


VARIANTS = [(name, {}) for name in OBJECTIVES] + [
    ("decoupled_ppo", {"proximal": "loglinear"}),
    ("decoupled_ppo", {"corrections": ["icepop", "masked_geometric"]}),
    ("grpo", {"kl": "k3", "kl_coefficient": 0.1}),
]


@pytest.mark.parametrize(("name", "kwargs"), VARIANTS, ids=lambda v: v if isinstance(v, str) else ",".join(v))
def test_objectives_2_any_split_into_micro_batches_gives_the_same_gradient(policy, kit, name, kwargs):
    objective = load_objective(name, kwargs)
    groups = kit.make_groups(np.random.default_rng(3), groups=3)
    whole, gradients = step_gradients(policy, objective, groups, 10_000)
    exact = 1e-10 if objective.critic is None else 1e-6  # a critic is float32
    assert whole.metrics["micro_batches"] == 1
    largest = max(g.abs().max() for g in gradients.values())
    for budget in (120, 40):
        in_parts, split = step_gradients(policy, objective, groups, budget)
        assert in_parts.metrics["micro_batches"] > 1
        assert in_parts.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=exact)
        worst = max((split[name] - g).abs().max() for name, g in gradients.items())
        assert worst <= exact * largest


def test_the_order_of_groups_does_not_matter(policy, kit):
    objective = load_objective("default", {})
    groups = kit.make_groups(np.random.default_rng(3), groups=3)
    one, gradients = step_gradients(policy, objective, groups, 60)
    other, reordered = step_gradients(policy, objective, groups[::-1], 60)
    assert other.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-10)
    torch.testing.assert_close(reordered, gradients, rtol=0, atol=1e-10)


class WaitedFor(Ranks):
    """A rank for which another one waits, with a row more."""

    def share(self, rows):
        return list(rows), [rows[0]]


@pytest.mark.parametrize("name", ["default", "decoupled_ppo", "ppo"])
def test_a_row_that_is_passed_for_nothing_changes_nothing(policy, kit, name):
    objective = load_objective(name, {})
    groups = kit.make_groups(np.random.default_rng(3), groups=3)
    one, gradients = step_gradients(policy, objective, groups, 60)
    waited_for, with_spare = step_gradients(policy, objective, groups, 60, WaitedFor)
    assert waited_for.metrics == one.metrics
    torch.testing.assert_close(with_spare, gradients, rtol=0, atol=0)


def test_the_loss_is_given_the_critics_advantages_and_every_sample_is_scored(policy, kit):
    seen = []

    def loss(x):
        seen.append(x.advantages)
        return ppo.loss(x)

    ppo = load_objective("ppo", {})
    groups = kit.make_groups(np.random.default_rng(3), groups=3)
    before = make_step(groups, 0, ppo)
    accumulated, _ = step_gradients(policy, replace(ppo, loss=loss), groups, 60)
    samples = accumulated.step.samples
    assert [s.index for s in samples] == sorted(accumulated.scored) == list(range(12))
    for sample, first in zip(samples, before.samples, strict=True):
        positions, logprobs = accumulated.scored[sample.index]
        np.testing.assert_array_equal(positions, np.flatnonzero(sample.action_mask))
        assert np.isfinite(logprobs).all()
        assert not np.array_equal(sample.advantages, first.advantages)
    given = np.concatenate([s.advantages[s.action_mask] for s in samples]).astype(np.float32)
    np.testing.assert_array_equal(torch.cat(seen).sort().values, np.sort(given))
