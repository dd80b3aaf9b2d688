"""Each objective's own law, what composes, and what is refused."""

import dataclasses

import numpy as np
import pytest
import torch

from sparring.backend.objectives import OBJECTIVES, load_objective
from sparring.backend.objectives.advantages import batch_norm, group_norm, normalise, per_turn_rewards
from sparring.backend.objectives.dapo import soft_overlong_penalty
from sparring.backend.objectives.decoupled_ppo import loglinear_proximal
from sparring.backend.objectives.gae import gae
from sparring.backend.objectives.gigpo import discounted_returns
from sparring.backend.objectives.m2po import second_moment_cut
from sparring.errors import ConfigError, TrainerError
from sparring.types import Group, StopReason, TokenSequence, Trajectory, Turn


def episode(reward, turns=1, *, anchors=None, turn_rewards=(), name="e"):
    n = 1 + turns
    anchors = anchors or [None] * turns
    marks = tuple(Turn(i + 1, i + 2, anchor=anchors[i]) for i in range(turns))
    sequence = TokenSequence(np.arange(n), np.arange(n) > 0, np.zeros(n), np.zeros(n), marks)
    return Trajectory(
        name, "g", "env", "task", 0, (sequence,), reward, StopReason.FINISHED, turn_rewards=tuple(turn_rewards)
    )


def test_objectives_5_rewards_1_and_3_normalise_to_minus_1_and_1():
    assert normalise(np.array([1.0, 3.0])).tolist() == [-1.0, 1.0]
    (credits,) = group_norm([Group("g", (episode(1.0), episode(3.0)))])
    assert [c.tolist() for c in credits] == [[-1.0], [1.0]]


@pytest.mark.parametrize("reward", [0.0, 0.1, 1e6, -0.3])
def test_objectives_5_an_all_equal_group_gives_0_and_no_nan(reward):
    assert normalise(np.full(7, reward)).tolist() == [0.0] * 7


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_5_all_advantages_0_gives_loss_0_and_finite_gradients(kit, name):
    objective = load_objective(name, {})
    x = kit.make_inputs(advantages=torch.zeros(18, dtype=torch.float64), step={"m2po/cut": 0.0})
    assert objective.loss(x).loss == 0
    assert kit.gradient(objective.loss, x).eq(0).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_every_objective_pulls_in_the_direction_of_the_advantage(kit, name):
    x = kit.make_inputs(drift=0.0, step={"m2po/cut": 0.0})
    gradient = kit.gradient(load_objective(name, {}).loss, x)
    assert (gradient.sign() == -x.advantages.sign()).all()


def test_objectives_6_turn_level_gae_by_hand():
    """λ = 0.5, γ = 1, zero values, turn rewards [0, 1]: δ = (0, 1), A = (0 + 0.5 · 1, 1)."""
    advantages, returns = gae(np.array([0.0, 1.0]), np.zeros(2), discount=1.0, trace=0.5)
    assert advantages.tolist() == [0.5, 1.0]
    assert returns.tolist() == [0.5, 1.0]


def test_gae_by_hand_with_values_and_discount():
    """γ = 0.9, λ = 0.5, V = (1, 2), r = (1, 3): δ₂ = 1, δ₁ = 1 + 1.8 − 1 = 1.8, A₁ = 1.8 + 0.45."""
    advantages, returns = gae(np.array([1.0, 3.0]), np.array([1.0, 2.0]), discount=0.9, trace=0.5)
    assert advantages.tolist() == pytest.approx([2.25, 1.0])
    assert returns.tolist() == pytest.approx([3.25, 3.0])


def test_gae_with_trace_1_is_the_discounted_return_minus_the_value():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=9), rng.normal(size=9)
    advantages, _ = gae(rewards, values, discount=0.9, trace=1.0)
    assert advantages == pytest.approx(discounted_returns(rewards, 0.9) - values)


def test_batch_norm_is_over_the_step_and_its_baseline_within_groups():
    groups = [Group("a", (episode(0.0), episode(1.0))), Group("b", (episode(10.0), episode(11.0)))]
    flat = np.concatenate([np.concatenate(g) for g in batch_norm(groups)])
    assert flat == pytest.approx((np.array([0, 1, 10, 11]) - 5.5) / np.std([0, 1, 10, 11]))
    flat = np.concatenate([np.concatenate(g) for g in batch_norm(groups, baseline=True)])
    assert flat.tolist() == [-1.0, 1.0, -1.0, 1.0]


def test_a_turn_discount_credits_the_last_turns_most():
    advantage = load_objective("rloo", {"turn_discount": 0.9}).advantage
    (credits,) = advantage([Group("g", (episode(10.0, turns=3), episode(0.0, turns=1)))])
    assert [c.tolist() for c in credits] == [pytest.approx([8.1, 9.0, 10.0]), [-10.0]]


def test_gigpo_compares_turns_that_start_from_the_same_state():
    one = episode(1.0, turns=2, anchors=["start", "door"], turn_rewards=[0.0, 1.0], name="one")
    two = episode(0.0, turns=2, anchors=["start", "wall"], turn_rewards=[0.0, 0.0], name="two")
    gigpo = load_objective("gigpo", {"discount": 0.5, "step_weight": 2.0}).advantage
    (credits,) = gigpo([Group("g", (one, two))])
    # episodes ±1; from "start" the returns are 0.5 and 0, so ±1 again; "door" and "wall" are alone: 0
    assert [c.tolist() for c in credits] == [[3.0, 1.0], [-3.0, -1.0]]


def test_an_episode_without_turn_rewards_earns_its_reward_at_the_last_turn():
    assert per_turn_rewards(episode(0.7, turns=3)).tolist() == [0.0, 0.0, 0.7]


def test_turn_rewards_that_do_not_match_the_turns_name_the_episode():
    with pytest.raises(TrainerError, match="episode odd: 3 turn rewards for 2 model turns"):
        per_turn_rewards(episode(1.0, turns=2, turn_rewards=[0, 0, 1], name="odd"))


def test_the_overlong_penalty_grows_over_the_last_part_of_the_budget():
    assert [soft_overlong_penalty(n, 100, 20) for n in (10, 80, 90, 100, 500)] == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_dapo_takes_the_overlong_penalty_off_the_reward():
    advantage = load_objective("dapo", {"max_tokens": 4, "overlong_buffer": 2, "advantage": "group_mean"}).advantage
    (credits,) = advantage([Group("g", (episode(1.0, turns=1), episode(1.0, turns=3)))])
    assert [c[0] for c in credits] == [0.25, -0.25]


def test_the_overlong_filter_takes_truncated_episodes_out_but_leaves_them_in_the_baseline():
    truncated = dataclasses.replace(episode(3.0), stop_reason=StopReason.MAX_TOKENS)
    advantage = load_objective("dr_grpo", {"overlong_filter": True}).advantage
    (credits,) = advantage([Group("g", (episode(0.0), truncated))])
    assert [c.tolist() for c in credits] == [[-1.5], [0.0]]


def test_m2po_takes_out_the_largest_second_moments_of_the_trust_region_alone(kit):
    log_ratio = torch.tensor([0.1, 0.2, 0.9, -0.9, -0.1, 0.05], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    behaviour = torch.full((6,), -2.0, dtype=torch.float64)
    x = kit.make_inputs(
        lengths=(6,), logprobs=(behaviour + log_ratio).requires_grad_(), behaviour=behaviour, advantages=advantages
    )
    # in the region: 0.1, 0.2, 0.9 and −0.1; their squares' mean is at most 0.04 without 0.9 alone
    cut = second_moment_cut(x, 0.04)
    assert cut == pytest.approx(0.04)
    x = dataclasses.replace(x, step={"m2po/cut": cut})
    kept = kit.gradient(load_objective("m2po", {}).loss, x) != 0
    assert kept.tolist() == [True, True, False, True, True, True]


def test_objectives_4_decoupled_ppo_has_the_gradient_of_truncated_importance_sampling(kit):
    x = kit.make_inputs(drift=0.8)
    weight = (x.logprobs - x.behaviour).detach().exp().clamp(max=2.0)
    expected = -weight * x.advantages / x.totals.tokens
    torch.testing.assert_close(kit.gradient(load_objective("decoupled_ppo", {}).loss, x), expected)
    recomputed = dataclasses.replace(x, proximal=x.logprobs.detach())
    recompute = load_objective("decoupled_ppo", {"proximal": "recompute"})
    assert recompute.needs_proximal
    torch.testing.assert_close(kit.gradient(recompute.loss, recomputed), expected)


def test_the_loglinear_proximal_goes_from_the_current_policy_to_the_behaviour_by_lag(kit):
    x = kit.make_inputs(lengths=(3,), lags=torch.tensor([0, 1, 4]))
    new, old = x.logprobs.detach(), x.behaviour
    expected = torch.stack([new[0], old[1], old[2] / 4 + 3 * new[2] / 4])
    torch.testing.assert_close(loglinear_proximal(x), expected)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage(kit):
    from sparring.backend.objectives.surrogate import clipped

    x = kit.make_inputs(advantages=torch.full((18,), -1.0, dtype=torch.float64))
    per_token, _ = clipped(0.2, 0.2, dual=3.0)(x, torch.full((18,), 2.0, dtype=torch.float64))  # ρ = 7.4
    assert per_token.tolist() == [3.0] * 18


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("truncated", [0.4, 1.0, 2.0, 2.0]),
        ("icepop", [0.0, 1.0, 4.0, 0.0]),
        ({"icepop": {"high": 9.0}}, [0.0, 1.0, 4.0, 8.0]),
    ],
)
def test_corrections_weigh_the_proximal_policy_against_the_behaviour(kit, correction, expected):
    ratio = torch.tensor([0.4, 1.0, 4.0, 8.0], dtype=torch.float64)
    behaviour = torch.full((4,), -3.0, dtype=torch.float64)
    x = kit.make_inputs(
        lengths=(2, 2), logprobs=(behaviour + ratio.log()).requires_grad_(), behaviour=behaviour,
        advantages=torch.ones(4, dtype=torch.float64),
    )  # fmt: skip
    loss = load_objective("dapo", {"against": "proximal", "corrections": [correction]}).loss
    torch.testing.assert_close(kit.gradient(loss, x), -torch.tensor(expected, dtype=torch.float64) / 4)


def test_masked_geometric_leaves_whole_sequences_out(kit):
    log_ratio = torch.tensor([0.1, -0.1, 0.1, 0.1], dtype=torch.float64)
    behaviour = torch.full((4,), -3.0, dtype=torch.float64)
    x = kit.make_inputs(
        lengths=(2, 2), logprobs=(behaviour + log_ratio).requires_grad_(), behaviour=behaviour,
        advantages=torch.ones(4, dtype=torch.float64),
    )  # fmt: skip
    loss = load_objective("dapo", {"against": "proximal", "corrections": ["masked_geometric"]}).loss
    assert (kit.gradient(loss, x) != 0).tolist() == [True, True, False, False]


def test_k2_and_k3_vanish_at_the_reference_and_pull_towards_it(kit):
    for name in ("k2", "k3"):
        loss = load_objective("rloo", {"kl": name, "kl_coefficient": 1.0}).loss
        x = kit.make_inputs(drift=0.0, advantages=torch.zeros(18, dtype=torch.float64))
        away = dataclasses.replace(x, reference=x.logprobs.detach() - 0.1)
        assert kit.gradient(loss, dataclasses.replace(x, reference=x.logprobs.detach())).abs().max() < 1e-12
        assert (kit.gradient(loss, away) > 0).all()


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"kl": "k1"}, "no expected gradient"),
        ({"kl": "k9"}, "'k9' is unknown"),
        ({"advantage": "rlo"}, "advantage='rlo' is unknown; there are rloo"),
        ({"corrections": ["truncated"]}, "against: proximal"),
        ({"against": "proximal", "corrections": ["iceberg"]}, "correction='iceberg' is unknown"),
        ({"against": "proximal", "corrections": [{"icepop": {"up": 1}}]}, "correction 'icepop'.*'up'"),
        ({"ratio": "turn"}, "ratio='turn' is unknown"),
        ({"surrogate": "x"}, "choose another objective"),
    ],
)
def test_parts_that_do_not_exist_or_do_not_fit_are_refused(kwargs, says):
    with pytest.raises(ConfigError, match=says):
        load_objective("grpo", kwargs)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_name_says_what_it_expands_to(name):
    assert set(load_objective(name, {}).parts) == {"advantage", "ratio", "corrections", "aggregation", "kl"}
