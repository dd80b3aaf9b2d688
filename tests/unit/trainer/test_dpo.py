"""DPO by TRL's trainer, on the tokens that were sampled and no others."""

import inspect
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from trl import DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from sparring.backend.buffer.harvest import make_pair
from sparring.backend.trainer.dpo import _Collator, _columns, train_dpo
from sparring.backend.trainer.packing import split_rows
from sparring.backend.trainer.passes import score_rows
from sparring.backend.trainer.policy import load_policy
from sparring.backend.trainer.step import make_sample
from sparring.errors import TrainerError


@pytest.fixture
def episodes(kit):
    """Episodes of two turns with a tool's result between them, four groups of two, at temperature 1."""

    def plain(trajectory):
        (sequence,) = trajectory.sequences
        turns = tuple(replace(turn, temperature=1.0) for turn in sequence.turns)
        return replace(trajectory, sequences=(replace(sequence, turns=turns),))

    groups = kit.make_groups(np.random.default_rng(0), groups=4, size=2)
    return [tuple(map(plain, g.trajectories)) for g in groups]


@pytest.fixture
def pairs(episodes):
    return [make_pair(chosen, rejected) for chosen, rejected in episodes]


def logprob_of(model, trajectory) -> float:
    """Summed over what the model said, by our own packed forward."""
    (sequence,) = trajectory.sequences
    sample = make_sample(sequence, np.zeros(len(sequence.turns)), version=0)
    scored = score_rows(model, split_rows([sample], 4096), torch.device("cpu"))
    return float(scored[0][1].sum())


def test_the_first_loss_is_that_of_the_reference_and_log_probabilities_are_ours(tiny_qwen3, episodes, pairs):
    _, _, (step,) = train_dpo(tiny_qwen3, pairs, beta=0.1, epochs=1, lr=1e-4, batch_size=4)
    assert step["loss"] == pytest.approx(math.log(2), abs=1e-4)
    model, _ = load_policy(tiny_qwen3, torch.float32)
    for side, name in ((0, "logps/chosen"), (1, "logps/rejected")):
        ours = np.mean([logprob_of(model, pair[side]) for pair in episodes])
        assert step[name] == pytest.approx(ours, rel=1e-5)


def test_training_prefers_what_was_rewarded(tiny_qwen3, episodes, pairs):
    before, _ = load_policy(tiny_qwen3, torch.float32)
    gaps = [logprob_of(before, chosen) - logprob_of(before, rejected) for chosen, rejected in episodes]
    told = []
    model, _, steps = train_dpo(
        tiny_qwen3, pairs, beta=0.1, epochs=6, lr=3e-4, batch_size=2, on_step=lambda *step: told.append(step)
    )
    assert told == [(i, step["loss"]) for i, step in enumerate(steps)]
    assert len(steps) == 12
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1
    assert steps[-1]["rewards/accuracies"] == 1.0
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    before.load_state_dict(state)
    for (chosen, rejected), gap in zip(episodes, gaps, strict=True):
        assert logprob_of(before, chosen) - logprob_of(before, rejected) > gap


def test_a_batch_is_trls_but_for_the_tokens_that_no_model_said(pairs):
    columns = [_columns(pair) for pair in pairs]
    ours = _Collator(pad_token_id=257)(columns)
    theirs = DataCollatorForPreference(pad_token_id=257)(columns)
    assert ours["input_ids"].tolist() == theirs["input_ids"].tolist()
    assert ours["attention_mask"].tolist() == theirs["attention_mask"].tolist()
    differing = (ours["completion_mask"] != theirs["completion_mask"]).sum(dim=1).tolist()
    assert differing == [3] * 8  # the tool's result between two turns
    for column in columns:
        column["chosen_mask"] = [1] * len(column["chosen_ids"])
        column["rejected_mask"] = [1] * len(column["rejected_ids"])
    assert _Collator(pad_token_id=257)(columns)["completion_mask"].tolist() == theirs["completion_mask"].tolist()


def test_a_loss_that_is_not_finite_is_refused(tiny_qwen3, pairs):
    with pytest.raises(TrainerError, match=r"the loss of step \d+ is nan; lower --learning-rate"):
        train_dpo(tiny_qwen3, pairs, beta=math.inf, epochs=2, lr=1e-4, batch_size=4)


def test_what_is_overridden_of_trl_has_its_signature():
    expected = "(self, dataset, processing_class, args, dataset_name)"
    signature = inspect.signature(DPOTrainer._prepare_dataset)
    assert f"({', '.join(signature.parameters)})" == expected
    assert str(inspect.signature(DPOTrainer._send_telemetry)) == "(self)"
    for column in ("completion_mask", "attention_mask", "input_ids"):  # what the loss reads of a batch
        assert f'"{column}"' in inspect.getsource(DPOTrainer._compute_loss) + inspect.getsource(
            DataCollatorForPreference
        )
