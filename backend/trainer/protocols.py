"""The trainer's two neighbours, as it sees them: TRL's protocols and what they lack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from sparring.types import Group

__all__ = ["BatchSource", "PendingEvaluation", "StartEvaluation", "StepBatch", "WeightPublisher"]


class StepBatch(Protocol):
    """The groups of one step and figures to log beside it (`backend.rollout.Batch`)."""

    @property
    def groups(self) -> tuple[Group, ...]: ...
    @property
    def stats(self) -> Mapping[str, float]: ...


class BatchSource(Protocol):
    """Where batches come from: TRL's RolloutWorkerProtocol plus `next_batch` (`backend.rollout.RolloutWorker`)."""

    rollout_buffer: Any
    metrics_queue: Any

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, model_version: int) -> None: ...
    def check_health(self, stale_after_s: float) -> None: ...
    def next_batch(self, version: int, timeout_s: float) -> StepBatch: ...


class WeightPublisher(Protocol):
    """TRL's WeightTransferProtocol plus the version that the weights sent next will carry."""

    next_version: int

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


class PendingEvaluation(Protocol):
    """An evaluation that is under way."""

    def done(self) -> bool:
        """Whether `result` would not wait."""
        ...

    def result(self) -> Mapping[str, Any]:
        """Wait, and give the figures for `metrics.jsonl`."""
        ...


class StartEvaluation(Protocol):
    """Begins an evaluation of the weights of `step`, which stay live until it is done.

    `beside`: training goes on meanwhile, and is to keep most of the engine.
    """

    def __call__(self, step: int, *, beside: bool) -> PendingEvaluation: ...
