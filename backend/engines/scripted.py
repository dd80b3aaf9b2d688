"""A sampling engine without a model, for tests of everything that stands on an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

from sparring.backend.engines.base import (
    Chunk,
    Completion,
    Engine,
    EngineHealth,
    FinishReason,
    PauseMode,
    SamplingParams,
    WeightSource,
)
from sparring.errors import EngineError

__all__ = ["Script", "ScriptedCall", "ScriptedEngine"]

Script = Callable[[Sequence[int]], Sequence[int]]


@dataclass(frozen=True)
class ScriptedCall:
    """One finished request. `version` is the engine's when the request began; the completion has each token's own."""

    prompt: tuple[int, ...]
    completion: Completion
    session_id: str | None
    version: int


class ScriptedEngine(Engine):
    """Says what it is told, token by token, and keeps everything else of the contract.

    A completion ends where the script's tokens end ("stop"), at the first of `stop_token_ids` ("stop"), at
    `max_new_tokens` ("length"), or when a pause aborts it. Stop strings are looked for only where `decode` is given.

    Attributes:
        log: every request that got a completion, in the order in which they ended.
        updates: (version, names of the tensors, or the folder) of every `update_weights`.
    """

    def __init__(
        self,
        script: Script | Iterable[Sequence[int]],
        *,
        latency_s: float = 0.0,
        logprob: float = -0.5,
        max_length: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """
        Args:
            script: the tokens that continue a prompt, by a function of it, or one completion after another.
            latency_s: seconds from one token to the next; at 0 every token still yields to the event loop.
            logprob: what each token reports.
            max_length: context length; a prompt that leaves no room in it is an `EngineError`.
        """
        self._script = script if callable(script) else _in_order(script)
        self._latency_s, self._logprob, self._max_length, self._decode = latency_s, logprob, max_length, decode
        self.version = 0
        self.log: list[ScriptedCall] = []
        self.updates: list[tuple[int, object]] = []
        self._started = False
        self._failure: str | None = None
        self._paused = False
        self._aborts = 0
        self._changed = asyncio.Event()
        self._running = 0

    async def start(self) -> None:
        self._started = True

    async def stop(self) -> None:
        self.crash("the engine was stopped")

    def crash(self, reason: str) -> None:
        """Die: pending requests and all later ones fail with `EngineError(reason)`."""
        self._failure = self._failure or reason
        self._wake()

    async def stream(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str | None = None
    ) -> AsyncIterator[Chunk]:
        self._check()
        room = sampling.max_new_tokens
        if self._max_length is not None:
            room = min(room, self._max_length - len(token_ids))
        if room < 1:
            raise EngineError(
                f"a prompt of {len(token_ids)} tokens leaves no room in a context of {self._max_length}: "
                "shorten the episode, or raise model.max_length"
            )
        version, aborts = self.version, self._aborts
        said: list[int] = []
        versions: list[int] = []
        finish: FinishReason = "stop"
        stop_string: str | None = None
        self._running += 1
        try:
            for token in self._script(token_ids):
                await asyncio.sleep(self._latency_s)
                while self._paused and self._aborts == aborts and self._failure is None:
                    await self._changed.wait()
                self._check()
                if self._aborts > aborts:
                    finish = "aborted"
                    break
                said.append(token)
                versions.append(self.version)
                yield Chunk([token])
                stop_string = self._stop_string(said, sampling)
                if token in sampling.stop_token_ids or stop_string is not None:
                    break
                if len(said) == room:
                    finish = "length"
                    break
        finally:
            self._running -= 1
        alternatives = [[(token, self._logprob)] for token in said] if sampling.top_logprobs else None
        completion = Completion(said, [self._logprob] * len(said), versions, finish, stop_string, alternatives)
        self.log.append(ScriptedCall(tuple(token_ids), completion, session_id, version))
        yield Chunk([], completion)

    async def pause(self, mode: PauseMode = "keep") -> None:
        self._check()
        self._paused = True
        self._aborts += mode == "abort"
        self._wake()

    async def update_weights(self, version: int, source: WeightSource) -> None:
        self._check()
        self.updates.append((version, [name for name, _ in source] if isinstance(source, Iterable) else source))
        self.version = version

    async def resume(self) -> None:
        self._check()
        self._paused = False
        self._wake()

    async def health(self) -> EngineHealth:
        self._check()
        running, waiting = (0, self._running) if self._paused else (self._running, 0)
        return EngineHealth(True, self.version, running, waiting)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)
        if not self._started:
            raise EngineError("the engine was not started: await start() first")

    def _stop_string(self, said: list[int], sampling: SamplingParams) -> str | None:
        if self._decode is None or not sampling.stop:
            return None
        text = self._decode(said)
        return next((string for string in sampling.stop if string in text), None)


def _in_order(completions: Iterable[Sequence[int]]) -> Script:
    remaining = iter(completions)

    def script(_: Sequence[int]) -> Sequence[int]:
        completion = next(remaining, None)
        if completion is None:
            raise EngineError("the script has no completion left: give ScriptedEngine as many as there are requests")
        return completion

    return script
