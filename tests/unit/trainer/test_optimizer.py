"""The learning rate. The optimizer with moments in bytes: what it keeps, that it learns as the other, and resumes."""

import sys

import pytest
import torch

from sparring.backend.trainer.optimizer import check_optimizer, rate_factor
from sparring.backend.trainer.trainer import AgentTrainer
from sparring.config import LoraConfig, TrainerConfig
from sparring.errors import ConfigError

# Long, since bitsandbytes is there in `make test-long` alone: where it is installed, every import of TRL loads it too.


@pytest.fixture
def train(tiny_qwen3, tmp_path, kit):
    pytest.importorskip("bitsandbytes")

    def run(name, *, resume=False, **trainer):
        config = kit.make_config(**trainer)
        made = AgentTrainer(tiny_qwen3, config, kit.source(), kit.KeepingPublisher(), run_dir=tmp_path / name)
        made.train(resume)
        return made

    return run


def moments(trainer):
    """Bytes of the optimizer's state by parameter, and of what types they are."""
    names = {p: name for name, p in trainer._policy.named_parameters()}
    state = trainer.optimizer.optimizer.state
    found = {names[p]: [v for key, v in of.items() if "state" in key or "exp_avg" in key] for p, of in state.items()}
    return (
        {name: sum(t.numel() * t.element_size() for t in tensors) for name, tensors in found.items()},
        {name: {t.dtype for t in tensors} for name, tensors in found.items()},
    )


@pytest.mark.long
def test_large_layers_have_moments_of_a_byte_and_the_embedding_and_norms_of_four(train):
    size, dtype = moments(train("a", steps=1, optimizer="adamw_8bit"))
    whole, _ = moments(train("b", steps=1))
    assert dtype["model.layers.0.mlp.up_proj.weight"] == {torch.uint8}
    assert dtype["model.embed_tokens.weight"] == dtype["model.layers.0.input_layernorm.weight"] == {torch.float32}
    layers = [name for name, kinds in dtype.items() if kinds == {torch.uint8}]
    assert sum(size[name] for name in layers) * 4 == sum(whole[name] for name in layers)


@pytest.mark.long
def test_its_updates_are_near_those_of_adamw(train):
    """Not equal: a moment has 256 values. Over three steps the way is the same one."""
    start = train("start", steps=1, learning_rate=1e-12)._policy.state_dict()
    ways = []
    for name in ("adamw", "adamw_8bit"):
        end = train(name, steps=3, optimizer=name)._policy.state_dict()
        ways.append(torch.cat([(end[key] - start[key]).flatten() for key in end]))
    assert torch.nn.functional.cosine_similarity(*ways, dim=0) > 0.98
    assert not torch.equal(*ways)


@pytest.mark.long
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=64)], ids=["whole", "adapter"])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(train, lora):
    knobs = {"optimizer": "adamw_8bit", "lora": lora}
    whole = train("whole", steps=4, **knobs)
    assert torch.uint8 in set().union(*moments(whole)[1].values())
    train("broken", steps=2, **knobs)
    resumed = train("broken", steps=4, resume=True, **knobs)
    assert resumed._source.asked == [2, 3]
    torch.testing.assert_close(resumed._policy.state_dict(), whole._policy.state_dict(), rtol=0, atol=0)


def test_without_its_package_it_is_refused_before_anything_starts(kit, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[bitsandbytes\]'"):
        check_optimizer(kit.make_config(optimizer="adamw_8bit").trainer)
    check_optimizer(kit.make_config().trainer)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4]),
        ("cosine", [1 / 3, 2 / 3, 1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]),
    ],
)
def test_the_rate_warms_up_and_follows_its_schedule_to_the_last_step(schedule, expected):
    knobs = TrainerConfig(steps=6, warmup_steps=2, schedule=schedule)
    assert [rate_factor(step, knobs) for step in range(6)] == pytest.approx(expected)
    assert rate_factor(6, knobs) == pytest.approx(float(schedule == "constant"))  # the scheduler looks one step ahead


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_stays_until_its_last_steps(schedule):
    knobs = TrainerConfig(steps=6, schedule=schedule, decay_steps=2)
    assert [rate_factor(step, knobs) for step in range(6)] == pytest.approx([1, 1, 1, 1, 1, 1 / 2])
    assert rate_factor(6, knobs) == 0


def test_a_run_with_fewer_steps_than_the_rate_may_fall_in_begins_at_the_whole_rate():
    longer, just = (TrainerConfig(steps=6, warmup_steps=2, schedule="linear", decay_steps=n) for n in (40, 4))
    assert [rate_factor(step, longer) for step in range(7)] == [rate_factor(step, just) for step in range(7)]
    assert rate_factor(2, longer) == 1


def test_a_rate_that_never_falls_takes_no_steps_to_fall():
    with pytest.raises(ValueError, match=r"trainer\.schedule=linear or cosine"):
        TrainerConfig(decay_steps=2)
