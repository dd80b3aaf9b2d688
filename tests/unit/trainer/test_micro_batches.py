"""objectives.md, test 2: any split into micro-batches gives the same gradient (ranks: test_trainer_ranks.py)."""

import numpy as np
import pytest
import torch

from sparring.backend.objectives import load_objective
from sparring.backend.objectives.load import OBJECTIVES
from sparring.backend.trainer.critic import Critic
from sparring.backend.trainer.packing import pack, split_rows
from sparring.backend.trainer.passes import prepare_step, proximal_of, score_rows
from sparring.backend.trainer.step import loss_inputs, make_step


def step_gradients(model, objective, groups, budget):
    step = make_step(groups, 0, objective)
    model.zero_grad()
    members = split_rows(step.samples, budget)
    rows = [pack(row) for row in members]
    earlier = score_rows(model, members, torch.device("cpu"))
    prepared = prepare_step(objective, step, earlier)
    critic = None
    if objective.critic is not None:
        torch.manual_seed(0)
        critic = Critic(objective.critic, None, 128, torch.device("cpu"))
        torch.nn.init.normal_(critic._head.weight, std=0.1)
        step = critic.credit(step, groups, critic.score(model, members, torch.device("cpu")))
        rows = [pack(row) for row in split_rows(step.samples, budget)]
    total = 0.0
    for row in rows:
        scores = model(row=row)
        proximal = proximal_of(row, earlier) if objective.needs_proximal else None
        x = loss_inputs(
            row,
            scores,
            step.totals,
            proximal=proximal,
            reference=row.behaviour_logprobs,
            step=prepared,
            values=critic.values(row, scores) if critic else None,
            targets=critic.targets_of(row) if critic else None,
        )
        loss = objective.loss(x).loss
        loss.backward()
        total += loss.item()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    if critic is not None:
        gradients["critic"] = critic._head.weight.grad.clone()
    return len(rows), total, gradients


VARIANTS = [(name, {}) for name in OBJECTIVES] + [
    ("decoupled_ppo", {"proximal": "loglinear"}),
    ("decoupled_ppo", {"corrections": ["icepop", "masked_geometric"]}),
    ("grpo", {"kl": "k3", "kl_coefficient": 0.1}),
]


@pytest.mark.parametrize(("name", "kwargs"), VARIANTS, ids=lambda v: v if isinstance(v, str) else ",".join(v))
def test_objectives_2_any_split_into_micro_batches_gives_the_same_gradient(policy, kit, name, kwargs):
    objective = load_objective(name, kwargs)
    groups = kit.make_groups(np.random.default_rng(3), groups=3)
    n, loss, gradients = step_gradients(policy, objective, groups, 10_000)
    exact = 1e-10 if objective.critic is None else 1e-6  # a critic is float32
    assert n == 1
    largest = max(g.abs().max() for g in gradients.values())
    for budget in (120, 40):
        n, split_loss, split = step_gradients(policy, objective, groups, budget)
        assert n > 1
        assert split_loss == pytest.approx(loss, rel=exact)
        worst = max((split[name] - g).abs().max() for name, g in gradients.items())
        assert worst <= exact * largest


def test_the_order_of_groups_does_not_matter(policy, kit):
    objective = load_objective("default", {})
    groups = kit.make_groups(np.random.default_rng(3), groups=3)
    _, loss, gradients = step_gradients(policy, objective, groups, 60)
    _, reordered_loss, reordered = step_gradients(policy, objective, groups[::-1], 60)
    assert reordered_loss == pytest.approx(loss, rel=1e-10)
    torch.testing.assert_close(reordered, gradients, rtol=0, atol=1e-10)
