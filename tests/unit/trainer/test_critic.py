"""PPO's critic: where rewards fall, what it learns, and that it survives a resume."""

import dataclasses

import numpy as np
import pytest
import torch

from sparring.backend.objectives import load_objective
from sparring.backend.objectives.base import CriticSpec
from sparring.backend.objectives.ppo import value_loss
from sparring.backend.trainer.critic import credit_episode
from sparring.backend.trainer.trainer import AgentTrainer
from sparring.config import ObjectiveConfig
from sparring.errors import ConfigError, TrainerError
from sparring.types import StopReason, TokenSequence, Trajectory, Turn


def episode(turn_rewards, reward=1.0):
    """Two turns of two tokens, a tool token between them."""
    mask = np.array([0, 1, 1, 0, 1, 1], bool)
    sequence = TokenSequence(np.arange(6), mask, np.zeros(6), np.zeros(6), (Turn(1, 3), Turn(4, 6)))
    return Trajectory(
        "e", "g", "env", "t", 0, (sequence,), reward, StopReason.FINISHED, turn_rewards=tuple(turn_rewards)
    )


def credit(level, turn_rewards=(), values=(0, 0, 0, 0), discount=1.0, trace=0.5):
    spec = CriticSpec(level, discount, trace, own_model=False, learning_rate=1e-3)
    advantages, returns = credit_episode(episode(turn_rewards), [np.array(values, float)], spec)
    return advantages[0].tolist(), returns[0].tolist()


def test_objectives_6_turn_level_gae_reaches_every_token_of_its_turn():
    advantages, returns = credit("turn", turn_rewards=[0.0, 1.0])
    assert advantages == returns == [0.5, 0.5, 1.0, 1.0]


def test_token_level_gae_by_hand():
    """The reward comes with the last token of its turn: δ = (0, 2, 0, 1), λ = 0.5."""
    assert credit("token", turn_rewards=[2.0, 1.0])[0] == [1.125, 2.25, 0.5, 1.0]


def test_an_episode_without_turn_rewards_is_paid_at_its_end():
    assert credit("token", trace=1.0)[1] == [1.0] * 4
    assert credit("turn", trace=0.5)[0] == [0.5, 0.5, 1.0, 1.0]


def test_a_perfect_value_leaves_no_advantage():
    advantages, returns = credit("token", values=(1, 1, 1, 1), trace=0.95)
    assert advantages == [0.0] * 4
    assert returns == [1.0] * 4


def test_turns_of_a_frozen_policy_pay_the_turn_before_them():
    whole = episode([1.0, 2.0], reward=3.0)
    (sequence,) = whole.sequences
    mask = np.array([0, 1, 1, 0, 0, 0], bool)
    frozen = dataclasses.replace(whole, sequences=(dataclasses.replace(sequence, action_mask=mask),))
    spec = CriticSpec("turn", 1.0, 1.0, own_model=False, learning_rate=1e-3)
    advantages, _ = credit_episode(frozen, [np.zeros(2)], spec)
    assert advantages[0].tolist() == [3.0, 3.0]


def test_the_value_loss_is_clipped_to_the_worse_of_both():
    from sparring.backend.objectives import LossInputs, Totals

    zeros = torch.zeros(2, dtype=torch.float64)
    x = LossInputs(
        logprobs=zeros, behaviour=zeros, advantages=zeros, sequence=torch.zeros(2, dtype=torch.long), n_sequences=1,
        lags=zeros, totals=Totals(2, 1, 1), values=torch.tensor([1.0, 0.1], dtype=torch.float64), old_values=zeros,
        returns=torch.ones(2, dtype=torch.float64),
    )  # fmt: skip
    out = value_loss(x, clip=0.2)
    assert out.loss.item() == pytest.approx((0.8**2 + 0.9**2) / 2 / 2)
    assert out.metrics["critic/clip_fraction"][0] == 1


@pytest.fixture
def make_trainer(tiny_qwen3, tmp_path, kit):
    def make(run="run", objective="ppo", steps=4, source=None, **kwargs):
        config = kit.make_config(steps=steps, learning_rate=1e-4, checkpoint_every=2)
        config = config.model_copy(update={"objective": ObjectiveConfig(name=objective, kwargs=kwargs)})
        records = []
        trainer = AgentTrainer(
            tiny_qwen3,
            config,
            source or kit.source(),
            kit.KeepingPublisher(),
            run_dir=tmp_path / run,
            on_step=records.append,
        )
        return trainer, records

    return make


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["head", "model"])
def test_the_critic_learns_the_returns_of_a_batch_that_repeats(make_trainer, kit, critic):
    same = kit.ListSource(lambda version: kit.make_groups(np.random.default_rng(0), version=version))
    trainer, records = make_trainer(steps=12, source=same, critic=critic, value_clip=9.0, level="turn")
    trainer.train()
    assert records[0]["critic/value"] == 0
    assert records[0]["critic/loss"] > 0.1  # rewards are uniform on [0, 1]
    assert records[-1]["critic/loss"] < 0.5 * records[0]["critic/loss"]


@pytest.mark.slow
def test_while_the_critic_warms_up_the_policy_stands_still(make_trainer):
    trainer, _ = make_trainer(steps=2, critic_warmup_steps=1)
    trainer.train()
    zero, one, two = (trainer._publisher.published[v]["model.norm.weight"] for v in (0, 1, 2))
    assert torch.equal(zero, one)
    assert not torch.equal(one, two)


@pytest.mark.slow
def test_a_resumed_run_has_its_critic_back(make_trainer, tmp_path):
    whole, _ = make_trainer("whole")
    whole.train()
    first, _ = make_trainer("broken", steps=2)
    first.train()
    resumed, _ = make_trainer("broken")
    resumed.train(resume=True)
    for one, other in ((whole.model, resumed.model), (whole._critic._head, resumed._critic._head)):
        torch.testing.assert_close(dict(one.named_parameters()), dict(other.named_parameters()), rtol=0, atol=0)
    other_kind, _ = make_trainer("broken", critic="model")
    with pytest.raises(TrainerError, match="critic of another kind"):
        other_kind.train(resume=True)


@pytest.mark.slow
def test_a_checkpoint_without_critic_is_refused(make_trainer):
    trainer, _ = make_trainer(objective="grpo", steps=2)
    trainer.train()
    ppo, _ = make_trainer()
    with pytest.raises(TrainerError, match="no critic"):
        ppo.train(resume=True)


@pytest.mark.parametrize("kwargs", [{"level": "word"}, {"critic": "giant"}, {"advantage": "rloo"}])
def test_what_ppo_cannot_do_is_refused(kwargs):
    with pytest.raises(ConfigError, match="objective 'ppo'"):
        load_objective("ppo", kwargs)
