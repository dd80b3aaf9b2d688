"""A command in a container: an exec whose hijacked connection the event loop reads, with no thread waiting."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from sparring.errors import SandboxError
from sparring.sandbox.daemon import DockerDaemon
from sparring.sandbox.process import CommandNotStarted, OnOutput, Process

__all__ = ["DockerProcess"]

# What the daemon itself writes to a command's output where the command could not be started, in one frame.
_DAEMON_SAYS = b"OCI runtime exec failed"
_ASK_S = 60.0  # whoever waits for the command has a deadline of his own; a busy daemon is not a broken one
_HEADER_BYTES = 8  # stream number, three zeros, big-endian length of the payload


class DockerProcess(Process, asyncio.Protocol):
    """One exec. Its end of output is the end of the command; the daemon is then asked for the exit code.

    Docker cannot kill an exec: `kill` is the sandbox's, and ends every process of it but the container's own.
    """

    def __init__(self, daemon: DockerDaemon, exec_id: str, on_output: OnOutput, kill: Callable[[], None]) -> None:
        self._daemon = daemon
        self._exec_id = exec_id
        self._on_output = on_output
        self._kill = kill
        self._header = bytearray()
        self._stream = 0
        self._left = 0  # bytes of the current frame that are still to come
        self._held = b""  # a first frame that may be the daemon's own words, until it is known
        self._first = True
        self._transport: asyncio.Transport | None = None
        self._ending: asyncio.Task[None] | None = None
        self.finished = asyncio.get_running_loop().create_future()

    @classmethod
    async def spawn(
        cls,
        daemon: DockerDaemon,
        container: str,
        argv: Sequence[str],
        on_output: OnOutput,
        kill: Callable[[], None],
        *,
        stdin: bool,
        env: Mapping[str, str],
        cwd: str,
        user: str,
    ) -> DockerProcess:
        """Start `argv` in a running container.

        Raises:
            SandboxError: as `DockerDaemon.call`.
        """

        def open_exec() -> tuple[str, socket.socket, bytes]:
            created = daemon.api.exec_create(
                container, list(argv), stdin=stdin, environment=dict(env), workdir=cwd, user=user
            )
            return created["Id"], *_hijack(daemon.api.exec_start(created["Id"], socket=True))

        opened = daemon.submit(open_exec)
        try:
            exec_id, connection, early = await daemon.result(opened, timeout_s=60.0)
        except BaseException:
            opened.add_done_callback(_close_abandoned)
            raise
        loop = asyncio.get_running_loop()

        def make() -> DockerProcess:
            return cls(daemon, exec_id, on_output, kill)

        if connection.family == socket.AF_UNIX:
            _, process = await loop.create_unix_connection(make, sock=connection)
        else:
            _, process = await loop.create_connection(make, sock=connection)
        if early:
            process.data_received(early)
        return process

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            if self._left:
                chunk = data[at : at + self._left]
                self._left -= len(chunk)
                at += len(chunk)
                self._push(chunk)
                continue
            missing = _HEADER_BYTES - len(self._header)
            self._header += data[at : at + missing]
            at += missing
            if len(self._header) == _HEADER_BYTES:
                self._stream, self._left = self._header[0], int.from_bytes(self._header[4:], "big")
                self._header.clear()

    def _push(self, chunk: bytes) -> None:
        if self._held:
            self._on_output(1, self._held)
            self._held = b""
        if self._first and chunk.startswith(_DAEMON_SAYS):
            self._held = chunk
        else:
            self._on_output(self._stream, chunk)
        self._first = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._ending = asyncio.get_running_loop().create_task(self._finish())

    async def _finish(self) -> None:
        """Ask for the exit code; a daemon that does not know it any more has lost the sandbox."""
        pause_s = 0.02
        try:
            while True:
                state = await self._daemon.call(lambda: self._daemon.api.exec_inspect(self._exec_id), timeout_s=_ASK_S)
                if not state["Running"]:
                    break
                await asyncio.sleep(pause_s)  # the connection ended before the command did
                pause_s = min(2 * pause_s, 1.0)
            if state["ExitCode"] is None:
                raise SandboxError("the Docker daemon lost a command; was it restarted?")
            if not state["Pid"]:
                raise CommandNotStarted(f"Docker could not start a command: {self._held.decode(errors='replace')}")
        except SandboxError as error:
            if not self.finished.done():
                self.finished.set_exception(error)
            return
        if not self.finished.done():
            if self._held:
                self._on_output(1, self._held)
            self.finished.set_result(state["ExitCode"])

    # Process

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close_stdin(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def kill(self) -> None:
        if not self.finished.done():
            self._kill()

    def abandon(self) -> None:
        """Close the connection: the container is going away."""
        if self._transport is not None:
            self._transport.abort()


def _hijack(stream: Any) -> tuple[socket.socket, bytes]:
    """The SDK's raw connection as a socket of our own, and the bytes that the SDK had read beyond the HTTP head."""
    raw = getattr(stream, "_sock", stream)
    response = stream._response
    connection = raw.dup()
    connection.setblocking(False)
    buffered = response.raw._fp.fp
    early: bytes = b""
    try:
        raw.setblocking(False)  # shared with the duplicate: a look into the buffer must not wait for more
        early = buffered.read1(1 << 16) or b""
    except (OSError, ValueError):
        pass
    response.close()
    return connection, early


def _close_abandoned(opened: asyncio.Future[tuple[str, socket.socket, bytes]]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        opened.result()[1].close()
