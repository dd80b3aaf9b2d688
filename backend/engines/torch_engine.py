"""The embedded engine inside this process: a slot engine on a Hugging Face model, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.backend.engines.base import WeightSource
from sparring.backend.engines.client import WorkerClient
from sparring.backend.engines.options import EngineOptions
from sparring.backend.engines.worker import Worker, make_scheduler, read_weights
from sparring.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TorchEngine"]

_STOP_DEADLINE_S = 60.0


class TorchEngine(WorkerClient):
    """Samples in a thread of this process, which a trainer in the same process shares the interpreter's lock with.

    For tests and for programs that only sample; beside a trainer use `ProcessEngine`, which takes the same arguments.
    """

    def __init__(self, model: str | Path | PreTrainedModel, *, tokenizer: Any = None, **options: Any) -> None:
        """
        Args:
            model: a folder, or a model, which is copied.
            tokenizer: decodes stop strings; by default the folder's own.
            options: those of `EngineOptions`, by name.
        """
        super().__init__()
        self._model, self._tokenizer = model, tokenizer
        self.options = EngineOptions(**options)
        self._thread: threading.Thread | None = None
        self._worker: Worker | None = None

    async def start(self) -> None:
        if self._thread is not None:
            return
        loop = asyncio.get_running_loop()

        def emit(events: list[dict[str, Any]]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._receive, events)

        scheduler = await asyncio.to_thread(make_scheduler, self._model, self.options, self._tokenizer)
        self._worker = Worker(scheduler, emit, lambda source: read_weights(source, scheduler.model))
        self._thread = threading.Thread(target=self._worker.run, name="sparring-engine", daemon=True)
        self._failure, self.version = None, 0
        self._thread.start()

    async def stop(self) -> None:
        if self._thread is None:
            return
        if self._failure is None:
            try:
                await self._call({"op": "stop"}, deadline_s=_STOP_DEADLINE_S)
            except EngineError:
                pass  # it died first, or hangs: a daemon thread goes with the process
        self._die("the engine was stopped")
        await asyncio.to_thread(self._thread.join, 1)
        self._thread = self._worker = None

    async def update_weights(self, version: int, source: WeightSource) -> None:
        async with self._updating:
            await self._call({"op": "update", "version": version, "source": source})
            self.version = version

    def _send(self, command: dict[str, Any]) -> None:
        assert self._worker is not None
        self._worker.inbox.put(command)

    async def _status(self) -> dict[str, Any]:
        assert self._worker is not None
        return self._worker.status()
