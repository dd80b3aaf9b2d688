"""The trainer as a whole, on the tiny model and random batches: versions, metrics, resume, refusals, Ctrl-C."""

import json
import os
import signal
import time
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparring.backend.objectives import LossOutputs, Objective, load_objective
from sparring.backend.objectives.advantages import rloo
from sparring.backend.trainer.checkpoint import latest_checkpoint
from sparring.backend.trainer.rejected import load_batch
from sparring.backend.trainer.trainer import AgentTrainer
from sparring.config import SamplingConfig
from sparring.errors import ConfigError, TrainerError


@pytest.fixture
def make_trainer(tiny_qwen3, tmp_path, kit):
    def make(config=None, run="run", source=None, **kwargs):
        parts = config or kit.make_config(), source or kit.source(), kit.KeepingPublisher()
        return AgentTrainer(tiny_qwen3, *parts, run_dir=tmp_path / run, **kwargs)

    return make


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def records(trainer):
    lines = (trainer._run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def without_times(record):
    return {k: v for k, v in record.items() if not k.startswith(("time/", "trainer/"))}


def test_a_step_asks_for_its_batch_when_the_version_before_is_published(make_trainer):
    """With η = 0 the batch of step v + 1 exists only after the weights of v: a prefetch would wait for ever."""
    trainer = make_trainer()
    trainer.train()
    assert trainer._source.asked == [0, 1, 2]
    assert trainer._source.events == ["version 0", "start", "version 1", "version 2", "version 3", "stop"]
    assert list(trainer._publisher.published) == [0, 1, 2, 3]
    torch.testing.assert_close(trainer._publisher.published[3], weights(trainer), rtol=0, atol=0)
    first, last = (trainer._publisher.published[v]["model.norm.weight"] for v in (0, 3))
    assert not torch.equal(first, last)


def test_a_trainer_of_its_own_settles_what_auto_computes_in(make_trainer, kit, monkeypatch):
    monkeypatch.setattr("sparring.backend.compute_type.bfloat16_slowdown", lambda: 27.3)
    assert make_trainer(kit.make_config(dtype="auto", device="cpu")).run_config.trainer.dtype == "float32"


def test_every_step_writes_its_metrics_and_evaluations_are_apart(make_trainer):
    seen = []

    def evaluate(step, *, beside):
        return SimpleNamespace(done=lambda: True, result=lambda: {"accuracy": step / 10})

    trainer = make_trainer(evaluate=evaluate, on_step=lambda r: seen.append(dict(r)))
    trainer.train()
    assert [(r["kind"], r["step"]) for r in seen] == [
        ("evaluation", 0), ("step", 1), ("step", 2), ("step", 3), ("evaluation", 3),
    ]  # fmt: skip
    assert records(trainer) == seen
    step = seen[1]
    promised = {
        "ess", "drift/mean/lag0", "drift/max/lag0", "kl/k3", "keep_fraction", "clip_fraction/shift", "entropy",
        "grad_norm", "loss", "reward", "packing", "tokens/trained", "time/wait_s", "time/train_s", "time/publish_s",
    }  # fmt: skip
    assert promised <= step.keys()
    assert 0 < step["ess"] <= 1
    assert step["packing"] > 1.3
    assert step["micro_batches"] > 1


def test_the_steps_take_all_the_time_that_passes(make_trainer):
    """What is reported and kept between two steps once counted to neither: a second a step, unseen."""
    reported = []

    def on_step(record):
        reported.append((time.perf_counter(), record))
        time.sleep(0.05)

    make_trainer(on_step=on_step, on_trained=lambda step, logprobs: time.sleep(0.05)).train()
    assert len(reported) == 3
    for (before, _), (now, record) in pairwise(reported):
        assert record["time/record_s"] >= 0.1
        assert record["time/step_s"] == pytest.approx(now - before, abs=0.08)


@pytest.mark.parametrize(
    ("name", "in_loss", "in_reward"),
    [("grpo", True, False), ("grpo", False, True), ("grpo", True, True), ("ppo", True, True)],
)
def test_a_kl_to_the_reference_is_in_the_loss_the_reward_or_both(make_trainer, kit, name, in_loss, in_reward):
    kwargs = {"kl": "k3", "kl_coefficient": 0.1} if in_loss else {}
    objective = load_objective(name, kwargs | ({"reward_kl": 0.01} if in_reward else {}))
    trainer = make_trainer(kit.make_config(steps=2), objective=objective)
    trainer.train()
    last = records(trainer)[-1]
    assert (last.get("kl/k3_to_reference", 0.0) > 0) is in_loss
    assert ("kl/behaviour_to_reference" in last) is in_reward


@pytest.mark.slow
def test_the_same_seed_gives_the_same_metrics_bit_for_bit(make_trainer):
    runs = []
    for run in ("one", "two"):
        trainer = make_trainer(run=run)
        trainer.train()
        runs.append([without_times(r) for r in records(trainer)])
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_an_interrupted_and_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(make_trainer, kit):
    whole = make_trainer(kit.make_config(steps=4, warmup_steps=3), run="whole")
    whole.train()

    def interrupt_in_step_3(record):
        if record["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    broken = make_trainer(kit.make_config(steps=4, warmup_steps=3), run="broken", on_step=interrupt_in_step_3)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    assert latest_checkpoint(broken._run_dir).name == "checkpoint-2"
    resumed = make_trainer(kit.make_config(steps=4, warmup_steps=3), run="broken")
    resumed.train(resume=True)
    assert resumed._source.asked == [2, 3]
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
    assert [without_times(r) for r in records(resumed)] == [without_times(r) for r in records(whole)]


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_the_optimizer_steps_waits_until_the_state_is_whole(make_trainer, number):
    trainer = make_trainer()
    step = trainer.optimizer.step

    def interrupted_step(*args, **kwargs):
        os.kill(os.getpid(), number)
        return step(*args, **kwargs)

    trainer.optimizer.step = interrupted_step
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 1
    assert [r["step"] for r in records(trainer)] == [1]
    assert latest_checkpoint(trainer._run_dir).name == "checkpoint-1"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
def test_who_insists_while_the_optimizer_steps_leaves_no_torn_checkpoint(make_trainer):
    trainer = make_trainer()
    step, steps = trainer.optimizer.step, []

    def interrupted_step(*args, **kwargs):
        steps.append(step(*args, **kwargs))
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    trainer.optimizer.step = interrupted_step
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 1
    assert latest_checkpoint(trainer._run_dir) is None


def test_a_run_that_died_before_its_first_checkpoint_resumes_from_the_start(make_trainer):
    trainer = make_trainer()
    trainer.train(resume=True)
    assert trainer._source.asked == [0, 1, 2]


@pytest.mark.slow
def test_a_finished_run_resumes_to_nothing(make_trainer):
    make_trainer().train()
    again = make_trainer()
    again.train(resume=True)
    assert again._source.asked == []
    assert again._source.events == ["version 3", "stop"]


def test_a_number_that_is_not_finite_stops_the_run_before_any_weight_changes(make_trainer):
    def loss(x):
        return LossOutputs(x.logprobs.sum() * float("nan"))

    trainer = make_trainer(objective=Objective("broken", rloo, loss))
    before = weights(trainer)
    with pytest.raises(TrainerError, match=r"step 1: not finite.*loss.*sparring view --batch .*rejected-batch-1"):
        trainer.train()
    torch.testing.assert_close(weights(trainer), before, rtol=0, atol=0)
    batch = load_batch(trainer._run_dir / "rejected-batch-1.safetensors")
    assert len(batch.sequences) == 8
    assert trainer._source.events[-1] == "stop"


@pytest.mark.parametrize("change", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}])
def test_a_truncated_sampling_distribution_is_refused_with_the_reason(make_trainer, kit, change):
    config = kit.make_config().model_copy(update={"sampling": SamplingConfig(**change)})
    with pytest.raises(ConfigError, match=f"sampling.{next(iter(change))}=.*importance ratio would be biased"):
        make_trainer(config)


def test_a_reward_that_is_not_finite_names_the_episode(make_trainer, kit):
    def groups(version):
        (group, *rest) = kit.make_groups(np.random.default_rng(0))
        first = type(group.trajectories[0])(**{**vars(group.trajectories[0]), "reward": float("nan")})
        return (type(group)(group.group_id, (first, *group.trajectories[1:])), *rest)

    trainer = make_trainer(source=kit.ListSource(groups))
    with pytest.raises(TrainerError, match=r"episode v0-g0-e0 .*reward nan"):
        trainer.train()
    (path,) = trainer._run_dir.glob("rejected-batch-*")
    assert np.isnan(load_batch(path).sequences[0].reward)
