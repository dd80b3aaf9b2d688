"""The event loop's side of an engine whose work is done by a `Worker`, in a thread or in another process."""

from __future__ import annotations

import asyncio
import itertools
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any

from sparring.backend.engines.base import Chunk, Completion, Engine, EngineHealth, PauseMode, SamplingParams
from sparring.errors import EngineError

__all__ = ["WorkerClient"]

_REPLY_DEADLINE_S = 300.0  # a worker answers between two steps; only a hung one takes longer


class WorkerClient(Engine):
    """Turns awaits into commands and events into results. A transport gives `_send`, and calls `_receive` or `_die`."""

    def __init__(self) -> None:
        self.version = 0
        self._failure: str | None = "the engine was not started: await start() first"
        self._ids = itertools.count()
        self._requests: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._updating = asyncio.Lock()

    @abstractmethod
    def _send(self, command: dict[str, Any]) -> None:
        """Hand a command to the worker, without waiting."""

    @abstractmethod
    async def _status(self) -> dict[str, Any]:
        """The worker's status now, without waiting for its step to end."""

    async def stream(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str | None = None
    ) -> AsyncIterator[Chunk]:
        async for chunk in self._request(token_ids, sampling, session_id, stream=True):
            yield chunk

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str | None = None
    ) -> Completion:
        # One event at the end instead of one a token: the event loop often shares its interpreter with a trainer.
        requests = self._request(token_ids, sampling, session_id, stream=False)
        try:
            return [chunk.completion async for chunk in requests][-1]  # type: ignore[return-value]
        finally:
            await requests.aclose()  # type: ignore[attr-defined]

    async def release(self, session_id: str) -> None:
        if self._failure is None:
            self._send({"op": "release", "session_id": session_id})

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._call({"op": "pause", "mode": mode})

    async def resume(self) -> None:
        await self._call({"op": "resume"})

    async def health(self) -> EngineHealth:
        self._check()
        status = await self._status()
        return EngineHealth(True, self.version, status["running"], status["waiting"])

    async def stats(self) -> dict[str, float]:
        """Counters since the start.

        `tokens` sampled, `steps` taken, `occupied_rows` summed over steps and their mean `occupancy`, `busy_s`
        seconds in steps, `prefill_computed` and `prefill_reused` prompt tokens, `evictions` of kept sessions, `pauses`.
        """
        self._check()
        stats = dict((await self._status())["stats"])
        stats["occupancy"] = stats["occupied_rows"] / max(stats["steps"], 1)
        return stats

    async def _request(
        self, token_ids: Sequence[int], sampling: SamplingParams, session_id: str | None, *, stream: bool
    ) -> AsyncIterator[Chunk]:
        self._check()
        request_id = next(self._ids)
        events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._requests[request_id] = events
        command = {"op": "submit", "id": request_id, "prompt": list(token_ids), "sampling": asdict(sampling)}
        self._send({**command, "session_id": session_id, "stream": stream})
        try:
            while True:
                event = await events.get()
                if event["event"] == "tokens":
                    yield Chunk(event["tokens"])
                    continue
                del self._requests[request_id]
                if event["event"] == "error":
                    raise EngineError(event["message"])
                yield Chunk(event["tokens"], _completion(event["completion"]))
                return
        finally:
            if self._requests.pop(request_id, None) is not None and self._failure is None:
                self._send({"op": "abort", "id": request_id})

    async def _call(self, command: dict[str, Any], deadline_s: float = _REPLY_DEADLINE_S) -> Any:
        self._check()
        call_id = next(self._ids)
        reply = asyncio.get_running_loop().create_future()
        self._replies[call_id] = reply
        self._send({**command, "id": call_id})
        try:
            async with asyncio.timeout(deadline_s):
                return await reply
        except TimeoutError:
            reason = f"the engine did not answer {command['op']!r} within {deadline_s:.0f} s: it hangs; restart it"
            if command["op"] != "status":  # what it was told may still happen, at a moment that nobody expects
                self._die(reason)
            raise EngineError(reason) from None
        finally:
            self._replies.pop(call_id, None)

    def _receive(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["event"] == "dead":
                self._die(event["reason"])
            elif event["event"] == "reply":
                reply = self._replies.get(event["id"])
                if reply is not None and not reply.done():
                    if "error" in event:
                        reply.set_exception(EngineError(event["error"]))
                    else:
                        reply.set_result(event.get("value"))
            elif event["id"] in self._requests:
                self._requests[event["id"]].put_nowait(event)

    def _die(self, reason: str) -> None:
        """Fail all that is pending, and all that comes later, for the first reason given."""
        self._failure = self._failure or reason
        for events in self._requests.values():
            events.put_nowait({"event": "error", "message": self._failure})
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineError(self._failure))

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)


def _completion(fields: dict[str, Any]) -> Completion:
    top = fields["top_logprobs"]
    if top is not None:  # JSON has no tuples
        top = [[(token, logprob) for token, logprob in alternatives] for alternatives in top]
    return Completion(**{**fields, "top_logprobs": top})
