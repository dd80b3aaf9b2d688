"""The embedded engine inside this process: a slot engine on a Hugging Face model, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.backend.engines.base import WeightSource
from sparring.backend.engines.client import WorkerClient
from sparring.backend.engines.worker import Worker, make_scheduler, read_weights
from sparring.config import LoraConfig
from sparring.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TorchEngine"]

_STOP_DEADLINE_S = 60.0


class TorchEngine(WorkerClient):
    """Samples in a thread of this process, which a trainer in the same process shares the interpreter's lock with.

    For tests and for programs that only sample; beside a trainer use `ProcessEngine`, which takes the same arguments.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        slots: int = 32,
        max_length: int = 2048,
        dtype: str = "bfloat16",
        device: str = "auto",
        threads: int = 1,
        deterministic: bool = False,
        seed: int = 0,
        kept_sessions: int | None = None,
        tokenizer: Any = None,
        lora: LoraConfig | None = None,
    ) -> None:
        """
        Args:
            model: a folder, or a model, which is copied.
            slots: most requests that decode together.
            max_length: context length in tokens, prompt and completion together.
            dtype: of weights, keys and logits: "float32", "bfloat16" or "float16".
            device: "cpu", "cuda", or "auto": a GPU where there is one.
            threads: torch threads, for the whole process.
            deterministic: a request's tokens and log-probabilities then depend on the weights, its prompt and its
                sampling alone, bit for bit: not on other requests, the order they came in, or its session. A seed that
                the request does not name comes from `seed`, its session and its prompt. Costs speed. Holds for one
                machine, one number of threads and one number of slots; weights that change under a running request
                change it at a moment that nothing fixes, so wait for requests before an update.
            seed: of the generator that gives each request without a seed its own.
            kept_sessions: sessions whose keys are kept between turns beyond the running ones; by default as many.
            tokenizer: decodes stop strings; by default the folder's own.
            lora: sample with an adapter beside the model's layers, at first one that changes nothing: new weights are
                then the adapter's tensors alone (`LAYER.lora_A.weight`, `LAYER.lora_B.weight`), or its PEFT folder.
        """
        super().__init__()
        self._model, self._tokenizer = model, tokenizer
        self._options = {
            "slots": slots,
            "max_length": max_length,
            "dtype": dtype,
            "device": device,
            "threads": threads,
            "deterministic": deterministic,
            "seed": seed,
            "kept_sessions": slots if kept_sessions is None else kept_sessions,
            "lora": lora.model_dump() if lora is not None else None,
        }
        self._thread: threading.Thread | None = None
        self._worker: Worker | None = None

    async def start(self) -> None:
        if self._thread is not None:
            return
        loop = asyncio.get_running_loop()

        def emit(events: list[dict[str, Any]]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._receive, events)

        scheduler = await asyncio.to_thread(make_scheduler, self._model, self._options, self._tokenizer)
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
