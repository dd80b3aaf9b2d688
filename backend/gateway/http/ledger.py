"""Sessions that are driven over HTTP from start to export: capacity, deadlines, and records until they are fetched."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from sparring.backend.engines.base import SamplingParams
from sparring.backend.gateway.record import SessionRecord
from sparring.backend.gateway.recorder import Recorder
from sparring.backend.gateway.session import Session
from sparring.errors import GatewayError
from sparring.types import Failure

__all__ = ["Finished", "Ledger", "SessionLimits"]

_KEPT_S = 3600.0


@dataclass(frozen=True)
class SessionLimits:
    """What a session gets that does not say otherwise."""

    turn_budget: int = 64
    token_budget: int = 65_536
    deadline_s: float = 1800.0


@dataclass(frozen=True)
class Finished:
    """A session that has ended. `failure` is its deadline, if that ended it."""

    record: SessionRecord
    api_key: str
    failure: Failure | None
    at: float


class Ledger:
    """Attributes:
    capacity: how many more sessions may start. None: any number.
    """

    def __init__(self, recorder: Recorder, limits: SessionLimits, capacity: int | None) -> None:
        self._recorder, self._limits, self.capacity = recorder, limits, capacity
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._finished: dict[str, Finished] = {}
        self._ended: dict[str, asyncio.Event] = {}

    def start(
        self,
        task_id: str,
        *,
        api_key: str | None,
        evaluation: SamplingParams | None,
        turn_budget: int | None,
        token_budget: int | None,
        deadline_s: float | None,
    ) -> Session:
        """
        Raises:
            GatewayError: 429 there is no capacity, 409 the key names a session that is still open.
        """
        self._forget_old()
        if self.capacity is not None and self.capacity <= 0:
            raise GatewayError("no capacity for another session now: try again later", status=429)
        number = 0
        while (session_id := f"{task_id}-{number}") in self._recorder.sessions or session_id in self._finished:
            number += 1
        deadline_s = deadline_s or self._limits.deadline_s
        session = self._recorder.open_session(
            session_id,
            turn_budget=turn_budget or self._limits.turn_budget,
            token_budget=token_budget or self._limits.token_budget,
            deadline_s=deadline_s,
            evaluation=evaluation,
            api_key=api_key,
        )
        if self.capacity is not None:
            self.capacity -= 1
        self._ended[session_id] = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._timers[session_id] = loop.call_later(deadline_s, self._expire, session_id)
        return session

    def end(self, session: Session, failure: Failure | None = None) -> Finished:
        """End a session and keep its record until it is exported. One that was opened in this process is only closed
        to further requests: its owner takes the record."""
        if session.session_id not in self._ended:
            return Finished(session.close(), session.api_key, failure, time.monotonic())
        timer = self._timers.pop(session.session_id, None)
        if timer is not None:
            timer.cancel()
        record = self._recorder.close_session(session.session_id)
        finished = Finished(record, session.api_key, failure, time.monotonic())
        self._finished[session.session_id] = finished
        self._ended[session.session_id].set()
        return finished

    async def export(self, session_id: str) -> Finished:
        """Wait until a session has ended, and hand its record out once.

        Raises:
            GatewayError: 404, there is no such session.
        """
        if session_id not in self._ended:
            raise GatewayError(f"session {session_id} is not known", status=404, param="session_id")
        await self._ended[session_id].wait()  # its deadline is the limit
        finished = self._finished.pop(session_id, None)
        self._ended.pop(session_id, None)
        if finished is None:
            raise GatewayError(f"session {session_id} was exported already", status=404, param="session_id")
        return finished

    def has_ended(self, api_key: str) -> bool:
        return any(finished.api_key == api_key for finished in self._finished.values())

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _expire(self, session_id: str) -> None:
        session = self._recorder.sessions.get(session_id)
        if session is not None:
            self.end(session, Failure("deadline", f"session {session_id} was not ended before its deadline"))

    def _forget_old(self) -> None:
        oldest = time.monotonic() - _KEPT_S
        for session_id in [id_ for id_, finished in self._finished.items() if finished.at < oldest]:
            del self._finished[session_id], self._ended[session_id]
