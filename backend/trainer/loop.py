"""Where transformers' loop meets the trainer: what it iterates over, what it calls between two steps, and its ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sparring.backend.trainer.step import Step
from sparring.errors import ConfigError

if TYPE_CHECKING:
    from sparring.backend.trainer.trainer import AgentTrainer

__all__ = ["LifeCycle", "Steps", "from_main", "refuse_sharding"]

T = TypeVar("T")


class Steps:
    """The data loader: one item an optimizer step, asked for when the step begins. No prefetch, so η = 0 works."""

    def __init__(self, trainer: AgentTrainer) -> None:
        self._trainer = trainer

    def __iter__(self) -> Iterator[Step]:
        while True:
            yield self._trainer._next_step()


class LifeCycle(TrainerCallback):
    """Where transformers' loop calls ours."""

    def __init__(self, trainer: AgentTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer._begin()

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        self._trainer._guard.hold()
        self._trainer._update_critic()
        self._trainer._optimizer_began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer._finish_step()


def refuse_sharding(accelerator: Accelerator) -> None:
    """
    Raises:
        ConfigError: accelerate was told to shard the parameters: checkpoints and weights would be of one shard.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ConfigError("accelerate is set to FSDP, which the trainer cannot do yet: unset ACCELERATE_USE_FSDP")


def from_main(accelerator: Accelerator, make: Callable[[], T]) -> T:
    """What `make` gives the main rank, on every rank; an error that it raises there is raised on all of them."""
    if accelerator.num_processes == 1:
        return make()
    payload: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            payload = [make()]
        except Exception as error:
            payload = [error]
    broadcast_object_list(payload, from_process=0)
    if isinstance(payload[0], Exception):
        raise payload[0]
    made: T = payload[0]
    return made
