"""A command that runs in a sandbox, as the host sees it: output is pushed as it comes, the end is a future."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeAlias, cast

from sparring.errors import SandboxError
from sparring.interrupt import process_groups

__all__ = ["CommandNotStarted", "HostProcess", "OnOutput", "Process"]

OnOutput: TypeAlias = Callable[[int, bytes], None]
"""Called with 1 (standard output) or 2 (standard error) and the bytes; must not block and must not raise."""


class CommandNotStarted(SandboxError):
    """A command was never run: its sandbox is at its process limit, or it is ending."""


class Process(ABC):
    """A running command. `finished` gives its exit code once it has ended and all of its output was pushed.

    `finished` fails with `SandboxError` where the sandbox broke under the command.
    """

    finished: asyncio.Future[int]

    def on_finished(self, call: Callable[[Self], object]) -> None:
        """Call with this process once it has finished; a failure that nobody waits for then makes no noise."""

        def finished(future: asyncio.Future[int]) -> None:
            if not future.cancelled():
                future.exception()
            call(self)

        self.finished.add_done_callback(finished)

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Queue bytes for standard input. Ignored where the command no longer reads."""

    @abstractmethod
    def close_stdin(self) -> None:
        """End of standard input, after what was queued."""

    @abstractmethod
    def kill(self) -> None:
        """Begin to end the command and what it started. Returns at once; `finished` follows."""


class HostProcess(Process, asyncio.SubprocessProtocol):
    """A process of this machine, in a session of its own; `kill` ends its process group.

    A descendant that keeps the pipes open after the process has ended does not delay `finished` by more than
    `_LINGER_S`.
    """

    _LINGER_S = 0.2

    def __init__(self, on_output: OnOutput) -> None:
        self._on_output = on_output
        self._transport: asyncio.SubprocessTransport | None = None
        self._open_pipes = {1, 2}
        self._linger: asyncio.TimerHandle | None = None
        self.finished = asyncio.get_running_loop().create_future()

    async def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | Path | None = None,
        stdin: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start `argv`, once, with a pipe as standard input if `stdin`, else the null device.

        Raises:
            OSError: the program cannot be started.
        """
        loop = asyncio.get_running_loop()
        pipe = asyncio.subprocess.PIPE
        await loop.subprocess_exec(
            lambda: self,
            *argv,
            stdin=pipe if stdin else asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )

    @property
    def pid(self) -> int:
        assert self._transport is not None
        return cast(int, self._transport.get_pid())

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)
        process_groups.add(self.pid)

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        self._on_output(fd, cast(bytes, data))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open_pipes.discard(fd)
        if not self._open_pipes and self._linger is not None:
            self._finish()

    def process_exited(self) -> None:
        process_groups.discard(self.pid)
        self._signal_group(signal.SIGKILL)  # what the command left behind in its group
        if self._open_pipes:
            self._linger = asyncio.get_running_loop().call_later(self._LINGER_S, self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        assert self._transport is not None
        if self._linger is not None:
            self._linger.cancel()
        code = self._transport.get_returncode()
        self._transport.close()
        if not self.finished.done():
            # A death by signal is reported as a shell does it: 128 + signal.
            self._conclude(code if code is not None and code >= 0 else 128 - (code or 0))

    def _conclude(self, exit_code: int) -> None:
        self.finished.set_result(exit_code)

    # Process

    def write(self, data: bytes) -> None:
        stdin = self._stdin()
        if stdin is not None and not stdin.is_closing():
            stdin.write(data)

    def close_stdin(self) -> None:
        stdin = self._stdin()
        if stdin is not None:
            stdin.close()

    def kill(self) -> None:
        if not self.finished.done():
            self._signal_group(signal.SIGKILL)

    def _stdin(self) -> asyncio.WriteTransport | None:
        assert self._transport is not None
        return cast("asyncio.WriteTransport | None", self._transport.get_pipe_transport(0))

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
