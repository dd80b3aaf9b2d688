"""The default objective: objectives.md, tests 4 and 5, and its masks, one by one."""

import math

import pytest
import torch

from sparring.backend.objectives import OBJECTIVES, load_objective
from sparring.backend.objectives.default import default
from sparring.config import OBJECTIVE_NAMES
from sparring.errors import ConfigError

UNMASKED = default(max_shift=1.0, max_drift=math.inf).loss


def test_objectives_4_without_masks_it_has_the_gradient_of_truncated_importance_sampling(kit):
    """Decoupled PPO (2505.24298): the clipped ratio to the proximal policy, which after one mini-batch is the current
    one, times the truncated weight of the proximal policy against the behaviour policy."""

    def decoupled_ppo(x):
        proximal = x.logprobs.detach()
        ratio = (x.logprobs - proximal).exp()
        weight = (proximal - x.behaviour).exp().clamp(max=2.0)
        surrogate = torch.min(ratio * x.advantages, ratio.clamp(0.8, 1.2) * x.advantages)
        return -(weight * surrogate).sum() / x.totals.tokens

    x = kit.make_inputs(drift=0.8)
    assert ((x.logprobs - x.behaviour).exp() > 2).any()
    (expected,) = torch.autograd.grad(decoupled_ppo(x), x.logprobs)
    torch.testing.assert_close(kit.gradient(UNMASKED, x), expected, rtol=1e-12, atol=1e-15)


def test_objectives_5_all_tokens_masked_gives_loss_0_and_finite_gradients(kit):
    x = kit.make_inputs(advantages=torch.full((18,), -1.0, dtype=torch.float64))
    loss = default(max_drift=-math.inf).loss
    out = loss(x)
    assert out.loss == 0
    assert out.metrics["keep_fraction"][0] == 0
    assert kit.gradient(loss, x).eq(0).all()


def test_on_policy_it_is_the_policy_gradient(kit):
    x = kit.make_inputs(drift=0.0)
    torch.testing.assert_close(kit.gradient(default().loss, x), -x.advantages / x.totals.tokens)


def test_a_token_pushed_too_far_in_probability_is_kept_out(kit):
    logprobs = torch.tensor([0.9, 0.9, 0.3, 0.3, 0.02], dtype=torch.float64).log().requires_grad_()
    behaviour = torch.tensor([0.6, 0.8, 0.6, 0.4, 0.001], dtype=torch.float64).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    x = kit.make_inputs(
        lengths=(2, 2, 1), logprobs=logprobs, behaviour=behaviour, advantages=advantages,
    )  # fmt: skip
    gradient = kit.gradient(default(max_drift=math.inf).loss, x)
    # the last ratio is 20, but its probability moved by 0.02 alone: it stays, its weight capped at 2
    expected = -torch.tensor([0.0, 0.9 / 0.8, 0.0, -0.3 / 0.4, 2.0], dtype=torch.float64) / 5
    torch.testing.assert_close(gradient, expected)


def test_a_sequence_drifted_away_is_dropped_where_its_advantage_is_negative_alone(kit):
    behaviour = torch.full((6,), -1.0, dtype=torch.float64)
    logprobs = torch.tensor([-1.5, -1.0, -1.5, -1.0, -1.1, -1.1], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    x = kit.make_inputs(lengths=(2, 2, 2), logprobs=logprobs, behaviour=behaviour, advantages=advantages)
    out = default(max_shift=1.0, max_drift=0.2).loss(x)
    kept = torch.autograd.grad(out.loss, logprobs)[0] != 0
    assert kept.tolist() == [False, False, True, True, True, True]
    total, count = out.metrics["clip_fraction/dropped_sequence"]
    assert (int(total), int(count)) == (2, 6)


def test_rejection_does_not_change_the_normaliser(kit):
    x = kit.make_inputs(drift=0.5)
    some, all_ = default(max_shift=0.05).loss, UNMASKED
    kept = kit.gradient(some, x) != 0
    assert 0 < kept.sum() < len(kept)
    torch.testing.assert_close(kit.gradient(some, x)[kept], kit.gradient(all_, x)[kept])


def test_the_configuration_knows_every_objective():
    assert set(OBJECTIVES) == set(OBJECTIVE_NAMES)


def test_an_unknown_objective_names_the_nearest():
    with pytest.raises(ConfigError, match="'defualt' is unknown; did you mean default"):
        load_objective("defualt", {})


def test_an_unknown_parameter_is_named():
    with pytest.raises(ConfigError, match=r"'default'.*max_shfit"):
        load_objective("default", {"max_shfit": 0.1})
