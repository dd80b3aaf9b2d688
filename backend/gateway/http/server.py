"""GatewayServer: uvicorn as a task of the recorder's own event loop."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from sparring.backend.gateway.http.app import make_app
from sparring.backend.gateway.http.head_deadline import HeadDeadlineProtocol
from sparring.backend.gateway.http.ledger import Ledger, SessionLimits
from sparring.backend.gateway.recorder import Recorder
from sparring.backend.listen import listen
from sparring.errors import ConfigError, GatewayError

__all__ = ["GatewayServer"]

# Longer than clients keep an idle connection, or a client would send into one that is just being closed.
_KEEP_ALIVE_S = 120
_GRACE_S = 5
_LEAST_ADMIN_KEY = 16
_KNOWN_ADMIN_KEYS = frozenset({"areal-admin-key", "sparring-admin-key"})


class GatewayServer:
    """Serves a recorder over HTTP while it runs.

    Args:
        port: 0 takes a free one.
        admin_key: opens the admin routes; None draws one.
        capacity: sessions that may start over HTTP before capacity is granted; None: any number.

    Attributes:
        base_url: with `/v1`, as OpenAI's clients want it; Anthropic's want it without.
        admin_key: as given or drawn.

    Raises:
        ConfigError: an admin key that can be guessed, on an address that others can reach.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        admin_key: str | None = None,
        limits: SessionLimits | None = None,
        capacity: int | None = None,
    ) -> None:
        weak = admin_key is not None and (len(admin_key) < _LEAST_ADMIN_KEY or admin_key in _KNOWN_ADMIN_KEYS)
        if weak and not _is_loopback(host):
            raise ConfigError(
                f"the admin key on {host} is a default or shorter than {_LEAST_ADMIN_KEY} characters: "
                "give a random one, or leave it out to have one drawn"
            )
        self._recorder, self._host, self._port = recorder, host, port
        self.admin_key = admin_key or secrets.token_urlsafe(32)
        self.base_url = ""
        self._ledger = Ledger(recorder, limits or SessionLimits(), capacity)
        app = make_app(recorder, self._ledger, admin_key=self.admin_key)
        config = uvicorn.Config(
            app,
            http=HeadDeadlineProtocol,
            lifespan="off",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: as `listen`.
            GatewayError: it did not start.
        """
        listener = listen(self._host, self._port)
        port = listener.getsockname()[1]
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        started = asyncio.create_task(self._server.ready.wait())
        try:
            await asyncio.wait((self._task, started), return_when=asyncio.FIRST_COMPLETED)
        finally:
            started.cancel()
        if self._task.done():
            raise GatewayError(f"the gateway did not start on {shown}:{port}") from self._task.exception()
        self.base_url = self._recorder.base_url = f"http://{shown}:{port}/v1"

    async def stop(self) -> None:
        """Stop listening; requests that still run get a few seconds. Idempotent."""
        self._ledger.close()
        self._recorder.base_url = None
        if self._task is None:
            return
        self._server.should_exit = True
        await asyncio.wait((self._task,), timeout=2 * _GRACE_S)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,))
        self._task = None

    async def __aenter__(self) -> GatewayServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class _Server(uvicorn.Server):
    """Leaves signals to the program that it runs in, and says when it is ready."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
