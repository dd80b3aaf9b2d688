"""The loop that owns a `Scheduler`: it takes commands between two decoding steps and reports what happened."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from sparring.backend.compute_type import computes_on_cpu
from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.options import EngineOptions
from sparring.backend.engines.scheduler import Decode, Event, Scheduler
from sparring.backend.engines.slot_model import SlotModel
from sparring.errors import EngineError

__all__ = ["Message", "Worker", "make_scheduler", "read_weights"]

Message = dict[str, Any]
"""A command to the worker, or an event from it. JSON, but for the weights of an engine in the same process."""


class Worker:
    """Commands come through `inbox`, from any thread; `emit` gets lists of events, from the thread of `run`.

    Commands: `submit`, `abort`, `release`, and, each answered by an event `reply`: `pause`, `resume`, `update`, `stop`.
    Events: `tokens`, `done`, `error` of a request; `reply`; `dead`, the last one, when the loop cannot go on.
    """

    def __init__(self, scheduler: Scheduler, emit: Callable[[list[Message]], None],
                 open_weights: Callable[[Any], Iterable[tuple[str, torch.Tensor]]]) -> None:  # fmt: skip
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.scheduler = scheduler
        self._emit, self._open_weights = emit, open_weights
        self._paused = False
        self._stopped = False
        self.pauses = 0

    def run(self) -> None:
        """Until `stop`. An exception that no request caused ends the loop with `dead`."""
        try:
            while not self._stopped:
                events: list[Message] = []
                for command in self._commands():
                    events += self._obey(command)
                if self._works():
                    try:
                        events += [_event(event) for event in self.scheduler.step()]
                    except EngineError as error:
                        events += [_event(event) for event in self.scheduler.fail_all(str(error))]
                if events:
                    self._emit(events)
        except Exception as error:
            self._emit([{"event": "dead", "reason": f"the engine's loop failed with {type(error).__name__}: {error}"}])
            raise

    def status(self) -> Message:
        """Safe from any thread: a snapshot, perhaps of the middle of a step."""
        scheduler = self.scheduler
        return {
            "version": scheduler.version,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "stats": {**scheduler.stats, "pauses": self.pauses},
        }

    def _works(self) -> bool:
        return not (self._paused or self._stopped) and bool(self.scheduler.running or self.scheduler.waiting)

    def _commands(self) -> list[Message]:
        commands = [] if self._works() else [self.inbox.get()]
        while True:
            try:
                commands.append(self.inbox.get_nowait())
            except queue.Empty:
                return commands

    def _obey(self, command: Message) -> list[Message]:
        operation = command["op"]
        if operation == "submit":
            sampling = SamplingParams(
                **{**command["sampling"], "stop": tuple(command["sampling"]["stop"]),
                   "stop_token_ids": tuple(command["sampling"]["stop_token_ids"])}
            )  # fmt: skip
            try:
                self.scheduler.submit(
                    command["id"], command["prompt"], sampling, command["session_id"], command["stream"]
                )
            except EngineError as error:
                return [{"event": "error", "id": command["id"], "message": str(error)}]
            return []
        if operation == "abort":
            self.scheduler.abort(command["id"])
            return []
        if operation == "release":
            self.scheduler.release(command["session_id"])
            return []
        reply: Message = {"event": "reply", "id": command["id"]}
        ended: list[Event] = []
        if operation == "pause":
            self._paused = True
            self.pauses += 1
            if command["mode"] == "abort":
                ended = self.scheduler.abort_all()
        elif operation == "resume":
            self._paused = False
        elif operation == "stop":
            self._stopped = True
        elif operation == "update":
            try:
                self.scheduler.model.load_weights(self._open_weights(command["source"]))
                self.scheduler.set_version(command["version"])
            except EngineError as error:
                reply["error"] = str(error)
        else:
            raise ValueError(f"unknown command {operation!r}")
        return [*(_event(event) for event in ended), reply]


def make_scheduler(model: Any, options: EngineOptions, tokenizer: Any = None) -> Scheduler:
    """Load a model and put a scheduler over it, in the thread that will run it.

    Args:
        model: a folder or a model object.
        tokenizer: what decodes stop strings; by default the folder's.
    """
    torch.set_num_threads(options.threads)
    device = options.device
    if device == "auto":
        device = "cpu" if computes_on_cpu(device) else "cuda"
    slot_model = SlotModel(
        model,
        slots=options.cache_slots + 1,
        rows=options.slots,
        max_length=options.max_length,
        dtype=getattr(torch, options.dtype),
        device=torch.device(device),
        row_by_row=options.deterministic,
        lora=options.lora,
    )
    return Scheduler(
        slot_model,
        slots=options.slots,
        cache_slots=options.cache_slots,
        max_length=options.max_length,
        deterministic=options.deterministic,
        seed=options.seed,
        decode=_lazy_decode(model, tokenizer),
    )


def read_weights(source: Any, model: SlotModel) -> Iterable[tuple[str, torch.Tensor]]:
    """Named tensors as they come, or those of a folder."""
    return model.read_folder(source) if isinstance(source, str | Path) else source


def _lazy_decode(model: Any, tokenizer: Any) -> Callable[[], Decode | None]:
    cached: list[Decode] = []

    def decode() -> Decode | None:
        if not cached:
            found = tokenizer
            if found is None and isinstance(model, str | Path):
                from transformers import AutoTokenizer

                found = AutoTokenizer.from_pretrained(model)
            if found is None:
                return None
            cached.append(lambda ids: str(found.decode(ids, skip_special_tokens=False)))
        return cached[0]

    return decode


def _event(event: Event) -> Message:
    if event.error is not None:
        return {"event": "error", "id": event.request_id, "message": event.error}
    if event.completion is None:
        return {"event": "tokens", "id": event.request_id, "tokens": event.token_ids}
    return {
        "event": "done",
        "id": event.request_id,
        "tokens": event.token_ids,
        "completion": dict(vars(event.completion)),
    }
