"""Checkpoints: exact, atomic, and refused where they are cut off, damaged or another model's."""

import functools
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from sparring.backend.trainer.checkpoint import (
    KeptCheckpoints,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    save_model,
)
from sparring.errors import TrainerError


class Training:
    """A model, its optimizer and its scheduler, and steps on them that depend on the random state."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda i: 1 / (i + 1))
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    def step(self) -> float:
        weight = torch.randn(1).item() + random.random() + np.random.rand()
        loss = self.model(torch.tensor([[1, 2, 3]])).logits.mean() * weight
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return weight

    def save(self, run_dir: Path, step: int) -> Path:
        return save_checkpoint(run_dir, step, self.model, self.tokenizer, self.optimizer, self.scheduler)

    def load(self, folder: Path) -> None:
        load_checkpoint(folder, self.model, self.optimizer, self.scheduler)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


@pytest.fixture
def training(tiny_qwen3):
    made = Training(tiny_qwen3, seed=1)
    made.step()
    return made


def test_a_checkpoint_restores_everything_bit_for_bit(training, tiny_qwen3, tmp_path):
    folder = training.save(tmp_path, 1)
    expected = [training.step() for _ in range(3)], training.weights()
    other = Training(tiny_qwen3, seed=2)
    other.load(folder)
    got = [other.step() for _ in range(3)], other.weights()
    assert got[0] == expected[0]
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=0)
    assert other.scheduler.get_last_lr() == training.scheduler.get_last_lr()


def test_a_schedule_that_ends_later_by_now_gives_the_rate_of_now(training, tiny_qwen3, tmp_path):
    training.scheduler.lr_lambdas = [lambda i: 1 - i / 2]
    training.step()
    assert training.scheduler.get_last_lr() == [0.0]
    other = Training(tiny_qwen3, seed=2)
    other.scheduler.lr_lambdas = [lambda i: 1 - i / 4]
    other.load(training.save(tmp_path, 2))
    assert [group["lr"] for group in other.optimizer.param_groups] == other.scheduler.get_last_lr() == [0.5e-2]
    other.step()
    assert other.scheduler.get_last_lr() == [0.25e-2]


def test_a_checkpoint_is_a_hugging_face_folder(training, tmp_path):
    folder = training.save(tmp_path, 1)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(dict(loaded.named_parameters()), dict(training.model.named_parameters()), rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(folder).chat_template == training.tokenizer.chat_template


def test_a_checkpoint_of_experts_in_several_files_restores_bit_for_bit(tmp_path, tiny_qwen3, monkeypatch):
    """transformers writes fused experts one by one, and large models in shards: neither names the parameters."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4,
             "num_experts_per_tok": 2, "vocab_size": 300}  # fmt: skip
    trainings = [Training(tiny_qwen3, seed=i) for i in (1, 2)]
    for training in trainings:
        torch.manual_seed(id(training))
        training.model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
        training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2, fused=True)
        training.scheduler = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda i: 1 / (i + 1))
    one, other = trainings
    one.step()
    save = Qwen3MoeForCausalLM.save_pretrained
    monkeypatch.setattr(Qwen3MoeForCausalLM, "save_pretrained", functools.partialmethod(save, max_shard_size="20KB"))
    folder = one.save(tmp_path, 1)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    other.load(folder)
    torch.testing.assert_close(other.weights(), one.weights(), rtol=0, atol=0)
    one.step()
    expected = one.weights()
    other.load(folder)
    other.step()
    torch.testing.assert_close(other.weights(), expected, rtol=0, atol=0)


def test_the_newest_are_kept_and_nothing_half_written_counts(training, tmp_path):
    for step in (8, 9, 10):
        training.save(tmp_path, step)
    KeptCheckpoints(tmp_path, newest=2, best=0).prune({8: 1.0})
    (tmp_path / ".checkpoint-11.partial").mkdir()
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-9"]
    assert latest_checkpoint(tmp_path).name == "checkpoint-10"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "trainer.json", "manifest.json"])
def test_a_checkpoint_cut_off_half_way_is_refused_before_anything_changes(training, tmp_path, name):
    folder = training.save(tmp_path, 1)
    file = folder / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    training.step()
    before = training.weights()
    with pytest.raises(TrainerError, match=r"checkpoint-1 is (damaged|incomplete)"):
        training.load(folder)
    torch.testing.assert_close(training.weights(), before, rtol=0, atol=0)


def test_a_flipped_byte_is_noticed(training, tmp_path):
    file = training.save(tmp_path, 1) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(TrainerError, match=r"damaged: model.safetensors"):
        training.load(file.parent)


def test_a_checkpoint_of_another_model_is_refused_by_name(training, tiny_qwen3, tmp_path):
    folder = training.save(tmp_path, 1)
    config = Qwen3Config(**{**training.model.config.to_dict(), "intermediate_size": 64})
    other = Training(tiny_qwen3, seed=0)
    other.model = Qwen3ForCausalLM(config)
    with pytest.raises(TrainerError, match=r"another model: 12 parameters differ, such as model.layers.0.mlp"):
        other.load(folder)


def test_a_foreign_folder_is_refused(training, tiny_qwen3):
    with pytest.raises(TrainerError, match="incomplete or not one of ours"):
        training.load(tiny_qwen3)


def test_a_full_disk_leaves_earlier_checkpoints_and_no_debris(training, tmp_path, monkeypatch):
    training.save(tmp_path, 1)

    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sparring.backend.trainer.checkpoint.save_file", no_space)
    with pytest.raises(TrainerError, match=r"checkpoint-2.*No space left.*intact"):
        training.save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
    assert json.loads((tmp_path / "checkpoint-1/trainer.json").read_text())["step"] == 1


def test_a_folder_says_of_which_type_its_weights_are(training, tmp_path):
    """Servers load a model in the type that its configuration names."""
    save_model(tmp_path, training.model, training.tokenizer, torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert training.model.dtype == torch.float32


def test_the_best_are_kept_beside_the_newest_and_those_whose_evaluation_is_under_way(tmp_path):
    kept, rewards = KeptCheckpoints(tmp_path, newest=1, best=2), {0: 9.0}

    def after(action, *arguments):
        action(*arguments)
        return sorted(int(p.name.partition("-")[2]) for p in tmp_path.glob("checkpoint-*"))

    def step(number, evaluate=False):
        if evaluate:
            assert kept.await_evaluation(number)
        (tmp_path / f"checkpoint-{number}").mkdir()
        kept.prune(rewards)

    assert after(step, 10, True) == [10]
    assert after(step, 11) == [10, 11]
    rewards[10] = 0.5
    assert after(kept.evaluated, 10, rewards) == [10, 11]
    assert after(step, 20, True) == [10, 20]
    assert after(step, 30, True) == [10, 20, 30]
    rewards[20] = 0.5
    rewards[30] = 0.7
    after(kept.evaluated, 20, rewards)
    assert after(kept.evaluated, 30, rewards) == [10, 30]  # of equal rewards the earlier
    assert after(step, 31) == [10, 30, 31]


def test_without_keep_best_no_evaluation_asks_for_a_checkpoint(tmp_path):
    assert not KeptCheckpoints(tmp_path, newest=1, best=0).await_evaluation(1)
