"""New weights into the engine while episodes run: TRL's `WeightTransferProtocol` over our engines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sparring.backend.rollout import Batch, RolloutWorker
from sparring.errors import EngineError, SparringError

if TYPE_CHECKING:
    import torch

    from sparring.backend.engines.base import Engine, WeightSource

_T = TypeVar("_T")

__all__ = ["LendingWorker", "Publication", "WeightPublisher"]

_RESUME_TIMEOUT_S = 30.0
_LEND_TIMEOUT_S = 330.0


@dataclass(frozen=True)
class Publication:
    """One update of the engine's weights. `paused_s` is how long decoding stood still for it."""

    version: int
    paused_s: float


class WeightPublisher:
    """Pauses the engine, which keeps its requests, loads the new weights and lets it go on.

    Called from the trainer's thread; the engine is driven on the worker's loop. `publish` does all of it; the
    protocol's single steps are for TRL's trainers, which give no version: those count up from `next_version`. However
    an update ends, the engine decodes again, and after a failure with the weights that it had; but a server that failed
    while it loaded may hold some of either, and the error ends the run, or takes the server out of its pool.

    Where the engine can tell, what it holds is compared with what was sent once it decodes again.

    Attributes:
        next_version: what the next `send_weights` publishes; the checkpoint's step where a run is resumed.
        publications: every update so far.
    """

    def __init__(self, worker: RolloutWorker, engine: Engine, *, timeout_s: float = 600.0) -> None:
        self._worker = worker
        self._engine = engine
        self._timeout_s = timeout_s
        self._paused_at: float | None = None
        self._loaded: int | None = None
        self.next_version = 0
        self.publications: list[Publication] = []

    def publish(self, version: int, weights: WeightSource) -> Publication:
        """Make `weights`, a Hugging Face folder or named tensors, the engine's, as those of `version`.

        Raises:
            EngineError: the engine could not load them in time, or holds others afterwards.
        """
        self.next_version = version
        self.pause()
        self._send(weights)
        self.resume()
        return self.publications[-1]

    def init_weight_transfer(self) -> None:
        """Make sure that the worker's loop and the engine run."""
        self._worker.open()

    def pause(self) -> None:
        """Nothing yet: the engine decodes on until the weights are ready to load."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Stage the tensors, pause the engine, load them. They are read while the caller waits, by another thread."""
        self._send(iterator)

    def resume(self) -> None:
        self._drive("resume after new weights", self._engine.resume())
        if self._loaded is not None and self._paused_at is not None:
            self.publications.append(Publication(self._loaded, time.monotonic() - self._paused_at))
            self._drive("verify new weights", self._engine.verify_weights())
        self._loaded = self._paused_at = None

    def destroy(self) -> None:
        """Nothing of its own to free: the worker ends the engine."""

    def _send(self, weights: WeightSource) -> None:
        version = self.next_version
        staged = self._drive(f"stage the weights of version {version}", self._engine.stage_weights(version, weights))
        self._paused_at = time.monotonic()
        self._drive("pause for new weights", self._engine.pause("keep"))
        self._drive(f"load the weights of version {version}", self._engine.update_weights(version, staged))
        self._loaded = version
        self.next_version = version + 1

    def _drive(self, action: str, coroutine: Coroutine[Any, Any, _T]) -> _T:
        try:
            return self._worker.run(coroutine, self._timeout_s)
        except BaseException as error:
            with contextlib.suppress(Exception):  # an engine that cannot go on either is reported by what came first
                self._worker.run(self._engine.resume(), _RESUME_TIMEOUT_S)
            self._paused_at = None
            if isinstance(error, SparringError) or not isinstance(error, Exception):
                raise
            reason = f"no end after {self._timeout_s:g} s" if isinstance(error, TimeoutError) else repr(error)
            raise EngineError(
                f"the engine could not {action}: {reason}; it serves version {self._engine.version}. "
                "Resume from the last checkpoint; look at the engine's log and at free memory"
            ) from error


class LendingWorker(RolloutWorker):
    """Gives the trainer the engine's memory together with each batch; new weights take it back.

    For synchronous training (η = 0), where nothing is sampled from a batch to the weights that it leads to.
    """

    def next_batch(self, version: int, timeout_s: float) -> Batch:
        batch = super().next_batch(version, timeout_s)
        self.run(self._engine.release_memory(), _LEND_TIMEOUT_S)
        return batch
