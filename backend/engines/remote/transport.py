"""HTTP to one server: keep-alive, a deadline on everything, and what a lost connection means."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import aiohttp

from sparring.errors import EngineError

__all__ = ["ENGINE_KEY", "Transport"]

ENGINE_KEY = "SPARRING_ENGINE_KEY"  # the environment variable with the API key of servers that run already

# The server (uvicorn) closes a connection that idled for 5 s; a client that keeps one as long loses requests to that.
_KEEPALIVE_S = 2.0
_RETRIES = 3
_DROPPED = (aiohttp.ClientError, TimeoutError)
_MAX_EVENT_BYTES = 64 * 2**20


class Transport:
    """Connections to `url`, made on the event loop that uses it first.

    What may be done twice goes over kept ones, and is sent again where one is lost before the first byte of an answer:
    as a rule the server closed an idle connection that we were about to use, and read nothing of it. What must not be
    (a load under a new name, memory given back, a broadcast) has a connection of its own, and is sent once.
    """

    def __init__(self, url: str, *, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # by whether it keeps connections
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        while self._sessions:
            await self._sessions.popitem()[1].close()

    async def get(self, path: str, *, deadline_s: float) -> dict[str, Any]:
        """The JSON object there; an empty one where something else answers, another program on that port, say.

        Raises:
            EngineError: as `post`.
        """
        answer = await self._call("GET", path, None, deadline_s, repeatable=True)
        return answer if isinstance(answer, dict) else {}

    async def post(self, path: str, body: Mapping[str, Any], *, deadline_s: float, repeatable: bool = False) -> Any:
        """The JSON that the server answers, of an error status too (servers explain themselves there); None if no JSON.

        Args:
            repeatable: no harm is done if the server does it twice.

        Raises:
            EngineError: no connection, no answer within `deadline_s` seconds, or a key that the server does not take.
        """
        return await self._call("POST", path, body, deadline_s, repeatable=repeatable)

    async def stream(self, path: str, body: Mapping[str, Any], *, deadline_s: float) -> AsyncGenerator[Any, None]:
        """The JSON objects of a server-sent event stream, which the server may begin twice; `deadline_s` bounds the
        silence between two of them."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=deadline_s)
        begun = False
        for attempt in range(_RETRIES + 1):
            try:
                async with self._session(keeps=True).post(
                    self.url + path, json=body, timeout=timeout, read_bufsize=_MAX_EVENT_BYTES
                ) as response:
                    self._check_key(response)
                    if response.content_type == "application/json":
                        yield await response.json()
                        return
                    async for line in response.content:
                        begun = True
                        if not line.startswith(b"data:"):
                            continue
                        data = line[5:].strip()
                        if data == b"[DONE]":
                            return
                        try:
                            event = json.loads(data)
                        except ValueError:
                            raise EngineError(f"{self.url}{path} streamed {data[:200]!r}, which is no JSON") from None
                        yield event
                    raise EngineError(f"the stream of {self.url}{path} ended early: is the server being stopped?")
            except _DROPPED as error:
                if begun or attempt == _RETRIES or not _may_retry(error):
                    raise self._lost(path, error, deadline_s) from error

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float, *, repeatable: bool
    ) -> Any:
        timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=min(10.0, deadline_s))
        for attempt in range(_RETRIES + 1):
            try:
                session = self._session(keeps=repeatable)  # not one that was closed meanwhile
                async with session.request(method, self.url + path, json=body, timeout=timeout) as response:
                    self._check_key(response)
                    raw = await response.read()
            except _DROPPED as error:
                if not repeatable or attempt == _RETRIES or not _may_retry(error):
                    raise self._lost(path, error, deadline_s) from error
                continue
            try:
                return json.loads(raw)
            except ValueError:
                if response.status >= 400:
                    said = raw[:200].decode(errors="replace")
                    raise EngineError(f"{self.url}{path} answered {response.status}: {said!r}") from None
                return None
        raise AssertionError("unreachable")

    def _session(self, *, keeps: bool) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineError(f"the connection to {self.url} was closed")
        session = self._sessions.get(keeps)
        if session is None:
            # Requests wait in the server, which schedules them; a limit here would only hide them from it.
            kept: dict[str, Any] = {"keepalive_timeout": _KEEPALIVE_S} if keeps else {"force_close": True}
            connector = aiohttp.TCPConnector(limit=0, **kept)
            session = self._sessions[keeps] = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return session

    def _check_key(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 401:
            ours = "another API key than ours" if self._headers else "an API key"
            raise EngineError(f"the server at {self.url} wants {ours}: set {ENGINE_KEY} to its key")

    def _lost(self, path: str, error: BaseException, deadline_s: float) -> EngineError:
        if isinstance(error, TimeoutError):
            return EngineError(f"{self.url}{path} gave no answer in {deadline_s:g} s")
        if isinstance(error, aiohttp.ClientConnectorError):
            return EngineError(f"no server answers at {self.url}: {error}")
        return EngineError(f"{self.url}{path} dropped the connection: {error or type(error).__name__}")


def _may_retry(error: BaseException) -> bool:
    """Whether a connection that had been made was lost, as against none being made, or an answer breaking off."""
    return not isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ClientPayloadError, TimeoutError))
