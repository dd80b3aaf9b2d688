"""What the trainer takes from TRL and transformers, by signature: an upgrade says here what moved."""

import inspect

import pytest
import transformers
import trl
from transformers import Trainer
from trl.trainer.base_trainer import _BaseTrainer

from sparring.backend.rollout import RolloutWorker
from sparring.backend.trainer.trainer import AsyncGRPOTrainer  # imported there without TRL's warning
from sparring.backend.weights import WeightPublisher

from trl.experimental.async_grpo.async_grpo_trainer import RolloutWorkerProtocol, WeightTransferProtocol  # isort: skip

# Called or relied upon as they are.
USED = {
    AsyncGRPOTrainer._sync_weight: "(self)",
    AsyncGRPOTrainer._sync_weight_merged: "(self, t0: float) -> tuple[float, float, float]",
    AsyncGRPOTrainer._streaming_iter: "(self)",
    AsyncGRPOTrainer._inner_training_loop: "(self, *args, **kwargs)",
    AsyncGRPOTrainer.log: "(self, logs: dict[str, float], start_time: float | None = None) -> None",
    _BaseTrainer.__init__: "(self, *args, **kwargs)",
    Trainer.create_optimizer: "(self, model=None) -> torch.optim.optimizer.Optimizer",
}
# Overridden: the loop calls ours with these arguments.
OVERRIDDEN = {
    "_init_training_state": "(self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial) -> tuple[int, int]",  # noqa: E501
    "_prepare_for_training": "(self, max_steps, train_dataloader, resume_from_checkpoint)",
    "_clip_grad_norm": "(self, model)",
    "_run_epoch": "(self, model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, trial, ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained, steps_trained_in_current_epoch)",  # noqa: E501
    "get_batch_samples": "(self, epoch_iterator: collections.abc.Iterator, num_batches: int, device: torch.device) -> tuple[list, torch.Tensor | int | None]",  # noqa: E501
    "get_train_dataloader": "(self) -> torch.utils.data.dataloader.DataLoader",
    "training_step": "(self, model, inputs, num_items_in_batch)",
    "floating_point_ops": "(self, inputs: dict[str, torch.Tensor | typing.Any]) -> int",
    "_send_telemetry": "(self)",
}


def test_trl_and_transformers_are_the_pinned_ones():
    assert trl.__version__ == "1.16.0"
    assert transformers.__version__.startswith("5.24.")


@pytest.mark.parametrize("function", USED, ids=lambda f: f.__qualname__)
def test_what_is_used_has_its_signature(function):
    assert str(inspect.signature(function)) == USED[function]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_what_is_overridden_has_its_signature(name):
    assert str(inspect.signature(getattr(AsyncGRPOTrainer, name))) == OVERRIDDEN[name]


def test_transformers_leaves_a_model_alone_that_says_it_is_sharded_already(tiny_qwen3):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_qwen3)
    assert model.is_distributed_loading_by_transformers is False
    model._is_distributed_loading_by_transformers = True  # what sharding.py sets
    assert model.is_distributed_loading_by_transformers is True
    for reader in (Trainer.__init__, Trainer._prepare_for_training):
        assert "is_distributed_loading_by_transformers" in inspect.getsource(reader)


def test_the_inherited_methods_read_what_our_constructor_sets():
    """The parent's constructor is skipped: these are all the attributes that the methods in use read from it."""
    source = "".join(
        inspect.getsource(getattr(AsyncGRPOTrainer, name))
        for name in ("_sync_weight", "_sync_weight_merged", "_streaming_iter", "_inner_training_loop", "log")
    )
    ours = {"_lora_sync", "_metrics", "model_version", "rollout_worker", "weight_transfer"}
    assert all(f"self.{name}" in source for name in ours)
    set_by_parent = inspect.getsource(AsyncGRPOTrainer.__init__)
    names = {word.split(".")[1] for word in _words(source) if word.startswith("self.")}
    read = {name for name in names if f"self.{name} =" in set_by_parent or f"self.{name}:" in set_by_parent}
    assert read - {"_groups_before_resume"} <= ours  # that one is written, for TRL's own worker alone


def _words(source: str) -> list[str]:
    return "".join(c if c.isalnum() or c in "_." else " " for c in source).split()


@pytest.mark.parametrize(
    ("protocol", "implementation"),
    [(RolloutWorkerProtocol, RolloutWorker), (WeightTransferProtocol, WeightPublisher)],
)
def test_our_parts_meet_trls_protocols(protocol, implementation):
    for name, method in vars(protocol).items():
        if name.startswith("_") or not callable(method):
            continue
        theirs = list(inspect.signature(method).parameters)
        ours = list(inspect.signature(getattr(implementation, name)).parameters)
        assert ours[: len(theirs)] == theirs, name
