"""Where transformers' loop meets the trainer: what it iterates over, and what it calls between two steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sparring.backend.trainer.step import Step

if TYPE_CHECKING:
    from sparring.backend.trainer.trainer import AgentTrainer

__all__ = ["LifeCycle", "Steps"]


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
        self._trainer._clock.start("optimizer")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer._finish_step()
