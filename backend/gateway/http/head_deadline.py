"""uvicorn's HTTP over httptools, with a deadline for a request's head, which uvicorn would wait for without end."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["HeadDeadlineProtocol"]


class HeadDeadlineProtocol(HttpToolsProtocol):
    """Ends a connection on which no request is served and no head has become whole in time.

    The time runs from the connection's beginning, and later from the first byte behind an answer, whatever the bytes
    are: a head that trickles, blank lines, or the rest of a body that nobody reads. Between requests, while nothing
    comes, uvicorn's keep-alive holds; the body of a request that is being served has its own deadline, in `body.py`.
    """

    head_timeout_s: ClassVar[float] = 30.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._expect_head()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._cancel()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.head_timeout_s, self.transport.abort)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
