"""objectives.md, test 2: any split into micro-batches gives the same gradient (ranks: test_trainer_ranks.py)."""

import numpy as np
import pytest
import torch

from sparring.backend.objectives import load_objective
from sparring.backend.objectives.load import OBJECTIVES
from sparring.backend.trainer.packing import pack, split_rows
from sparring.backend.trainer.step import loss_inputs, make_step


def step_gradients(model, objective, step, budget):
    model.zero_grad()
    rows = [pack(members) for members in split_rows(step.samples, budget)]
    total = 0.0
    for row in rows:
        scores = model(row=row)
        loss = objective.loss(loss_inputs(row, scores, step.totals)).loss
        loss.backward()
        total += loss.item()
    return len(rows), total, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if n == "default"])
def test_objectives_2_any_split_into_micro_batches_gives_the_same_gradient(policy, kit, name):
    objective = load_objective(name, {})
    step = make_step(kit.make_groups(np.random.default_rng(3), groups=3), 0, objective)
    n, loss, gradients = step_gradients(policy, objective, step, 10_000)
    assert n == 1
    largest = max(g.abs().max() for g in gradients.values())
    for budget in (120, 60, 30):
        n, split_loss, split = step_gradients(policy, objective, step, budget)
        assert n > 1
        assert split_loss == pytest.approx(loss, rel=1e-10)
        worst = max((split[name] - g).abs().max() for name, g in gradients.items())
        assert worst <= 1e-10 * largest


def test_the_order_of_groups_does_not_matter(policy, kit):
    objective = load_objective("default", {})
    groups = kit.make_groups(np.random.default_rng(3), groups=3)
    _, loss, gradients = step_gradients(policy, objective, make_step(groups, 0, objective), 60)
    _, reordered_loss, reordered = step_gradients(policy, objective, make_step(groups[::-1], 0, objective), 60)
    assert reordered_loss == pytest.approx(loss, rel=1e-10)
    torch.testing.assert_close(reordered, gradients, rtol=0, atol=1e-10)
