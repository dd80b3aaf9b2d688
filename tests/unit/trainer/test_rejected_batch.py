"""What a run refused to train is written down whole, and shown with what is wrong in it."""

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from sparring.backend.objectives import LossOutputs, Objective
from sparring.backend.objectives.advantages import rloo
from sparring.backend.trainer.rejected import keep_batch, load_batch
from sparring.backend.trainer.step import make_step
from sparring.backend.trainer.trainer import AgentTrainer
from sparring.cli import main
from sparring.errors import TrainerError
from sparring.types import Group


@pytest.fixture
def groups(kit):
    return kit.make_groups(np.random.default_rng(0), groups=2, size=2)


@pytest.fixture
def step(groups):
    return make_step(groups, 0, Objective("plain", rloo, lambda x: LossOutputs(x.logprobs.sum())))


def scores_of(step):
    rng = np.random.default_rng(1)
    positions = {s.index: np.flatnonzero(s.action_mask) for s in step.samples}
    return {i: (where, rng.normal(-3, 1, len(where)).astype(np.float32)) for i, where in positions.items()}


def test_a_batch_comes_back_as_it_was(groups, step, tmp_path):
    scored = scores_of(step)
    told = keep_batch(tmp_path, "not finite: loss", {"step": 7, "loss": float("nan")}, groups, step.samples, scored)
    path = tmp_path / "rejected-batch-7.safetensors"
    assert told == f"the batch: sparring view --batch {path}"
    batch = load_batch(path)
    assert (batch.step, batch.problem) == (7, "not finite: loss")
    assert np.isnan(batch.record["loss"])
    trajectories = [t for g in groups for t in g.trajectories]
    for sequence, trajectory, sample in zip(batch.sequences, trajectories, step.samples, strict=True):
        assert (sequence.episode_id, sequence.reward) == (trajectory.episode_id, trajectory.reward)
        assert sequence.tokens == trajectory.sequences[0]
        np.testing.assert_array_equal(sequence.advantages, sample.advantages)
        np.testing.assert_array_equal(sequence.logprobs[sample.action_mask], scored[sample.index][1])
        assert np.isnan(sequence.logprobs[~sample.action_mask]).all()
        assert sequence.not_finite() == {}


def test_what_is_not_finite_is_told_apart(groups, step, tmp_path):
    scored = scores_of(step)
    scored[0][1][1:3] = np.nan
    scored[1][1][0] = 1000.0  # its ratio overflows, and no log-probability is above 0
    keep_batch(tmp_path, "x", {"step": 1}, groups, step.samples, scored)
    first, second, *others = load_batch(tmp_path / "rejected-batch-1.safetensors").sequences
    actions = [np.flatnonzero(s.tokens.action_mask).tolist() for s in (first, second)]
    assert first.not_finite() == {"log p": actions[0][1:3], "ratio": actions[0][1:3]}
    assert second.not_finite() == {"ratio": actions[1][:1]}
    assert [s.not_finite() for s in others] == [{}, {}]


def test_a_batch_that_never_came_to_a_step_has_its_tokens_and_rewards(groups, tmp_path):
    keep_batch(tmp_path, "episode x: reward nan", {"step": 1}, groups, (), {})
    batch = load_batch(tmp_path / "rejected-batch-1.safetensors")
    assert [s.reward for s in batch.sequences] == [t.reward for g in groups for t in g.trajectories]
    assert {(s.advantages, s.logprobs, s.ratios) for s in batch.sequences} == {(None, None, None)}


def test_sequences_without_an_action_do_not_shift_the_others(groups, tmp_path, kit):
    group = groups[0]
    silent = kit.make_sequence(np.random.default_rng(2), np.arange(5))
    silent = type(silent)(silent.token_ids, np.zeros(len(silent)), np.zeros(len(silent)), -np.ones(len(silent)))
    first = group.trajectories[0]
    both = type(first)(**{**vars(first), "sequences": (silent, *first.sequences)})
    mixed = (Group(group.group_id, (both, *group.trajectories[1:])),)
    step = make_step(mixed, 0, Objective("plain", rloo, lambda x: LossOutputs(x.logprobs.sum())))
    scored = scores_of(step)
    keep_batch(tmp_path, "x", {"step": 1}, mixed, step.samples, scored)
    quiet, spoken, _ = load_batch(tmp_path / "rejected-batch-1.safetensors").sequences
    assert quiet.logprobs is None
    np.testing.assert_array_equal(spoken.logprobs[spoken.tokens.action_mask], scored[0][1])


@pytest.mark.parametrize("content", [b"", b"{}", b"PK\x03\x04" * 100])
def test_another_file_is_no_batch(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(TrainerError, match="is no batch that a run rejected"):
        load_batch(path)


def test_other_tensors_are_no_batch_and_a_missing_file_is_named(tmp_path):
    save_file({"weight": np.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(TrainerError, match="is no batch that a run rejected"):
        load_batch(tmp_path / "model.safetensors")
    with pytest.raises(TrainerError, match=r"cannot read the batch .*nothing.safetensors: No such file"):
        load_batch(tmp_path / "nothing.safetensors")


def test_a_full_disk_does_not_hide_what_happened(groups, step, tmp_path, monkeypatch):
    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sparring.backend.trainer.rejected.save_file", no_space)
    told = keep_batch(tmp_path, "x", {"step": 1}, groups, step.samples, {})
    assert "could not be written" in told
    assert "No space left" in told


def test_a_run_with_a_weight_that_is_not_finite_shows_where_it_bites(tiny_qwen3, tmp_path, kit, capsys):
    trainer = AgentTrainer(tiny_qwen3, kit.make_config(), kit.source(), kit.KeepingPublisher(), run_dir=tmp_path)
    bad = int(trainer._source.make(0)[0].trajectories[0].sequences[0].token_ids[-2])
    with torch.no_grad():  # the embedding of one token that an episode holds
        trainer.model.get_input_embeddings().weight[bad] = float("inf")
    with pytest.raises(TrainerError, match=r"sparring view --batch (\S+)") as raised:
        trainer.train()
    path = str(raised.value).split()[-1]
    assert main(["view", "--batch", path]) == 0
    shown = capsys.readouterr().out
    assert "step 1: step 1: not finite" not in shown
    assert "not finite in the step's metrics: " in shown
    row = next(line for line in shown.splitlines() if "v0-g0-e0" in line)
    assert "log p " in row
    assert main(["view", "--batch", path, "v0-g0-e0"]) == 0
    assert "nan" in capsys.readouterr().out
    assert main(["view", "--batch", path, "no-such-episode"]) == 2
    assert "holds no episode 'no-such-episode'" in capsys.readouterr().err


def test_the_command_wants_a_run_or_a_batch(capsys):
    assert main(["view"]) == 2
    assert "needs a run folder" in capsys.readouterr().err
    assert main(["view", "--batch", "FILE", "EPISODE", "more"]) == 2
