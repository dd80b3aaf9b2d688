"""Several servers as one engine: a request goes where its prefix is cached unless that server is much busier."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparring.backend.deadlines import end_now
from sparring.backend.engines.base import (
    Chunk,
    Completion,
    Engine,
    EngineHealth,
    PauseMode,
    SamplingParams,
    WeightSource,
)
from sparring.errors import EngineError

__all__ = ["EnginePool"]

_log = logging.getLogger(__name__)

_PREFIX_TOKENS = 64  # requests of one group, and turns of one episode, agree on so many tokens
_REMEMBERED = 65536
_IMBALANCE = 1.25
_SLACK = 8
_MISSED = 3


@dataclass(eq=False)
class _Member:
    """`fault` is why no request goes there; a member that missed an update comes back with the next one.

    Attributes:
        returning: it answers again, and takes part in the update that it comes back with.
    """

    engine: Engine
    load: int = 0
    missed: int = 0
    fault: str | None = None
    returning: bool = False
    waits: set[asyncio.Timeout] = field(default_factory=set)

    @asynccontextmanager
    async def awaited(self) -> AsyncIterator[None]:
        """Its answer is waited for inside, but only while it is in the pool: nobody opens its gate after that.

        Raises:
            EngineError: it was taken out.
        """
        if self.fault is not None:
            raise EngineError(self.fault)
        try:
            async with asyncio.timeout(None) as wait:
                self.waits.add(wait)
                try:
                    yield
                finally:
                    self.waits.discard(wait)
        except TimeoutError as error:
            if not wait.expired():
                raise
            raise EngineError(str(self.fault)) from error

    def take_out(self, fault: str) -> None:
        self.fault, self.returning = fault, False
        waits, self.waits = self.waits, set()
        for wait in waits:
            end_now(wait)


class EnginePool(Engine):
    """Routes to the member that saw the request's prefix, else to the least loaded one.

    A member that fails is taken out, and its requests go to another, but for streams that said something, which fail.
    It comes back when its health check passes and it holds the current weights, or else with the next update. With no
    member left, requests fail.
    """

    def __init__(self, engines: Sequence[Engine], *, check_every_s: float = 5.0) -> None:
        if not engines:
            raise ValueError("a pool needs at least one engine")
        self._members = [_Member(engine) for engine in engines]
        self._homes: OrderedDict[object, _Member] = OrderedDict()
        self._check_every_s = check_every_s
        self._checking: asyncio.Task[None] | None = None
        self._staged: dict[Engine, tuple[int, WeightSource]] = {}
        self._paused = False
        self.version = 0

    async def start(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for member in self._members:
                    tasks.create_task(member.engine.start())
        except* EngineError as errors:
            await self.stop()
            raise EngineError("; ".join(str(error) for error in errors.exceptions)) from errors
        self.version = min(member.engine.version for member in self._members)  # until the first update makes them equal
        self._checking = asyncio.get_running_loop().create_task(self._check_forever())

    async def stop(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait({self._checking})  # one that died of a bug holds up nothing; asyncio logs it
            self._checking = None
        await asyncio.gather(*(member.engine.stop() for member in self._members))

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str | None = None
    ) -> Completion:
        while True:
            member = self._route(token_ids, session_id)
            member.load += 1
            try:
                async with member.awaited():
                    return await member.engine.generate(token_ids, sampling, session_id=session_id)
            except EngineError as error:
                if not await self._is_to_blame(member, error):
                    raise
            finally:
                member.load -= 1

    async def stream(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        begun = done = False
        while not done:
            member = self._route(token_ids, session_id)
            member.load += 1
            try:
                stream = member.engine.stream(token_ids, sampling, session_id=session_id)
                async with aclosing(stream) as chunks:  # type: ignore[type-var]  # every engine's stream is a generator
                    while not done:
                        async with member.awaited():
                            chunk = await anext(chunks)
                        begun, done = True, chunk.completion is not None
                        yield chunk
            except EngineError as error:
                if not await self._is_to_blame(member, error) or begun:
                    raise
            finally:
                member.load -= 1

    async def release(self, session_id: str) -> None:
        home = self._homes.pop(session_id, None)
        if home is not None:
            await home.engine.release(session_id)

    async def pause(self, mode: PauseMode = "keep") -> None:
        self._paused = True
        await self._everywhere(lambda engine: engine.pause(mode))

    async def stage_weights(self, version: int, source: WeightSource) -> WeightSource:
        out = [member for member in self._members if member.fault is not None]
        # They missed earlier weights, or lost them in a restart: no request may go there until they have these.
        for member, answers in zip(out, await asyncio.gather(*map(self._answers, out)), strict=True):
            member.returning = answers
        shared = source if isinstance(source, Path) else list(source)

        async def on(engine: Engine) -> None:
            self._staged[engine] = version, await engine.stage_weights(version, shared)

        await self._everywhere(on)
        return shared

    async def update_weights(self, version: int, source: WeightSource) -> None:
        if any(self._staged.get(member.engine, (None, ()))[0] != version for member in self._reached()):
            await self.stage_weights(version, source)
        await self._everywhere(lambda engine: engine.update_weights(version, self._staged.pop(engine)[1]))
        self.version = version
        for member in self._reached():
            self._take_back(member)

    async def resume(self) -> None:
        self._paused = False
        await self._everywhere(lambda engine: engine.resume())

    async def release_memory(self) -> None:
        self._paused = True
        await self._everywhere(lambda engine: engine.release_memory())

    async def verify_weights(self) -> None:
        await self._everywhere(lambda engine: engine.verify_weights())

    async def health(self) -> EngineHealth:
        live = self._live()
        answers = await asyncio.gather(*(member.engine.health() for member in live), return_exceptions=True)
        states = [answer for answer in answers if isinstance(answer, EngineHealth)]
        faults = [member.fault for member in self._members if member.fault is not None]
        faults += [str(answer) for answer in answers if isinstance(answer, Exception)]
        return EngineHealth(
            ok=any(state.ok for state in states),  # requests go to those that are left
            version=self.version,
            running=sum(state.running for state in states),
            waiting=sum(state.waiting for state in states),
            detail="; ".join([*faults, *(state.detail for state in states if state.detail)]),
        )

    def _live(self) -> list[_Member]:
        return self._some(member for member in self._members if member.fault is None)

    def _reached(self) -> list[_Member]:
        return self._some(member for member in self._members if member.fault is None or member.returning)

    def _some(self, chosen: Iterable[_Member]) -> list[_Member]:
        """
        Raises:
            EngineError: there is none.
        """
        members = list(chosen)
        if not members:
            raise EngineError("no server of the pool is left: " + "; ".join(str(m.fault) for m in self._members))
        return members

    def _route(self, token_ids: Sequence[int], session_id: str | None) -> _Member:
        live = self._live()
        least = min(live, key=lambda member: member.load)
        key = session_id if session_id is not None else hash(tuple(token_ids[:_PREFIX_TOKENS]))
        home = self._homes.get(key)
        if home is None or home.fault is not None or home.load > least.load * _IMBALANCE + _SLACK:
            home = self._homes[key] = least
        self._homes.move_to_end(key)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return home

    async def _everywhere(self, act: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
        members = self._reached()
        results = await asyncio.gather(*(act(member.engine) for member in members), return_exceptions=True)
        for member, result in zip(members, results, strict=True):
            if isinstance(result, EngineError):
                self._take_out(member, result)
            elif isinstance(result, BaseException):
                raise result
        self._reached()

    def _take_out(self, member: _Member, error: EngineError) -> None:
        known = member.fault is not None and not member.returning  # to other requests that failed there
        member.take_out(f"server {self._members.index(member)} was taken out: {error}")
        if not known:
            _log.warning("%s; its requests go to the others", member.fault)

    def _take_back(self, member: _Member) -> None:
        if member.fault is not None:
            _log.warning("server %d of the pool is back", self._members.index(member))
        member.fault, member.returning = None, False

    async def _is_to_blame(self, member: _Member, error: EngineError) -> bool:
        """Whether a request failed for its member, which is out then; else the request would fail elsewhere too."""
        if member.fault is None and not await self._healthy(member):
            self._take_out(member, error)
        return member.fault is not None

    async def _answers(self, member: _Member) -> bool:
        return await self._health_of(member) is not None

    async def _healthy(self, member: _Member) -> bool:
        health = await self._health_of(member)
        return health is not None and health.ok

    async def _health_of(self, member: _Member) -> EngineHealth | None:
        try:
            return await member.engine.health()
        except EngineError:
            return None
        except Exception:  # of what answers there in its place, perhaps; the others are looked after all the same
            _log.exception("the health check of server %d of the pool broke", self._members.index(member))
            return None

    def _may_return(self, member: _Member) -> bool:
        """In a pause it may hold the weights of before it; let go on, it would sample while new ones are loaded."""
        return not self._paused and member.engine.version == self.version

    async def _check_forever(self) -> None:
        while True:
            await asyncio.sleep(self._check_every_s)
            await self._check_all()

    async def _check_all(self) -> None:
        for member in self._members:
            healthy = await self._healthy(member)
            member.missed = 0 if healthy else member.missed + 1
            if member.missed >= _MISSED and member.fault is None:  # one may be missed for work
                self._take_out(member, EngineError(f"{_MISSED} health checks in a row failed"))
            elif healthy and member.fault is not None and self._may_return(member):
                with suppress(EngineError):
                    await member.engine.resume()  # it may have been taken out for failing just that
                    # Paused, it passed with whatever weights; and meanwhile the pool may have been paused.
                    if await self._healthy(member) and self._may_return(member):
                        self._take_back(member)
