"""A process in a sandbox that is given one piece of code after another, and keeps its state between them."""

from __future__ import annotations

import asyncio
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sparring.errors import SandboxError
from sparring.sandbox.command import DEADLINE_GRACE_S, ExecResult, answered_by
from sparring.sandbox.output import BoundedOutput
from sparring.sandbox.process import Process
from sparring.sandbox.request import SandboxRequestError

if TYPE_CHECKING:
    from sparring.sandbox.core import Sandbox

__all__ = ["Session"]

# An end mark is \x1e, 24 hexadecimal digits drawn for the call, the exit code, one word of the session's own, \n.
_END = re.compile(rb" (\d{1,3}) ([^\n]*)\n")
_LONGEST_END = 1 << 16  # a folder's name as bash quotes it, and more
_OLD_MARK = re.compile(r"\x1e[0-9a-f]{24} \d{1,3} [^\n]*\n")
_INTERRUPT_EVERY_S = 0.2
# After the first interrupt the process has this long to come back; else it is replaced.
_COME_BACK_S = 1.0


class _Call:
    """One command's output on both streams, each up to its end mark, which also tells the exit code."""

    def __init__(self, limit: int) -> None:
        self.mark = b""
        self.outputs = {1: BoundedOutput(limit), 2: BoundedOutput(limit)}
        self.exit_code: int | None = None
        self.word = ""
        self.done = asyncio.Event()
        self._pending = {1: b"", 2: b""}
        self._open = {1, 2}

    def new_mark(self) -> str:
        """Wait for another mark from now on."""
        name = secrets.token_hex(12)
        self.mark = b"\x1e" + name.encode()
        return name

    def feed(self, stream: int, data: bytes) -> None:
        if stream not in self._open:
            return
        data = self._pending[stream] + data
        while (at := data.find(self.mark)) >= 0:
            behind = at + len(self.mark)
            if (end := _END.match(data, behind)) is not None:
                self._end(stream, data[:at], int(end[1]), end[2].decode("utf-8", "replace"))
                return
            if len(data) - behind < _LONGEST_END:  # the rest is to come
                self.outputs[stream].feed(data[:at])
                self._pending[stream] = data[at:]
                return
            # Code that found the mark out, and would have what follows kept without a bound.
            self.outputs[stream].feed(data[:behind])
            data = data[behind:]
        keep = len(self.mark) - 1  # the mark may be cut between two reads
        self.outputs[stream].feed(data[:-keep])
        self._pending[stream] = data[-keep:]

    def _end(self, stream: int, rest: bytes, exit_code: int, word: str) -> None:
        self.outputs[stream].feed(rest)
        self.exit_code, self.word = exit_code, word
        self._pending[stream] = b""
        self._open.discard(stream)
        if not self._open:
            self.done.set()

    def text(self, stream: int) -> str:
        return _OLD_MARK.sub("", self.outputs[stream].text())

    def flush(self) -> None:
        """Count what may have been the beginning of a mark as output."""
        for stream in self._open:
            self.outputs[stream].feed(self._pending[stream])


class Session(ABC):
    """Runs code in one process, one call at a time; a call that hangs is interrupted and the process lives on.

    A process that does not come back, or ends, is replaced at the next call; `generation` counts how often.
    """

    name: ClassVar[str]

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._process: Process | None = None
        self._call: _Call | None = None
        self._lock = asyncio.Lock()
        self._closed = False
        self.generation = 0

    @abstractmethod
    def _argv(self) -> Sequence[str]:
        """What to run: a program that reads orders and, after each, writes its mark to both outputs."""

    @abstractmethod
    def _order(self, code: str, mark: str) -> bytes:
        """Tells the process to run `code`, then to end both outputs with `mark`."""

    @abstractmethod
    def _interruption(self, mark: str) -> bytes:
        """Tells the process to interrupt what it runs, then to end both outputs with `mark`."""

    def _preamble(self) -> bytes:
        """What a new process is told first."""
        return b""

    def _ended(self, word: str) -> None:  # noqa: B027  # most have no use for the word
        """A call ended with this word in its mark."""

    async def start(self, *, timeout_s: float = 30.0) -> None:
        """Start the process; otherwise the first call does.

        Raises:
            SandboxError: the sandbox is broken, or lacks the program.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        call = await self._begin(deadline)
        if not call.done.is_set() and asyncio.get_running_loop().time() < deadline:
            async with answered_by(deadline, self._sandbox):
                await self._sandbox.clear()  # what other commands left may have taken all processes there may be
            call = await self._begin(deadline)
        if not call.done.is_set():
            said = call.text(2).strip()[-300:]
            raise SandboxError(f"{self._sandbox}: no {self.name} within {timeout_s:g} s; is it in the image? {said}")

    async def _begin(self, deadline: float) -> _Call:
        async with answered_by(deadline + _COME_BACK_S, self._sandbox):
            self._process = await self._sandbox.spawn(self._argv(), self._on_output, stdin=True)
        self.generation += 1
        self._process.write(self._preamble())
        call, _ = await self._run("", deadline)
        return call

    async def exec(self, code: str, *, timeout_s: float = 30.0) -> ExecResult:
        """Run code, its standard input empty. Returns within `timeout_s` + 2 s, whatever it does.

        Raises:
            SandboxRequestError: a NUL byte.
            SandboxError: the session is closed, or the sandbox broke.
        """
        if "\0" in code:
            raise SandboxRequestError("code cannot have a NUL byte")
        async with self._lock:
            if self._closed:
                raise SandboxError(f"the {self.name} session is closed; open another one")
            loop = asyncio.get_running_loop()
            started = loop.time()
            if self._process is None or self._process.finished.done():
                await self.start(timeout_s=timeout_s)
            call, timed_out = await self._run(code, started + timeout_s)
            exit_code = call.exit_code
            if exit_code is None:
                exit_code = await self._reap(started + timeout_s + DEADLINE_GRACE_S)
            else:
                self._ended(call.word)
            async with answered_by(started + timeout_s + DEADLINE_GRACE_S, self._sandbox):
                oom_killed = exit_code == 137 and not timed_out and await self._sandbox.post_mortem(exit_code)
            return ExecResult(
                124 if timed_out else exit_code,
                call.text(1),
                call.text(2),
                loop.time() - started,
                truncated=any(output.truncated for output in call.outputs.values()),
                timed_out=timed_out,
                oom_killed=oom_killed,
            )

    async def close(self) -> None:
        """End the process and what it runs. Idempotent."""
        self._closed = True
        process, self._process = self._process, None
        if process is not None and not process.finished.done():
            process.close_stdin()
            await asyncio.wait([process.finished], timeout=2.0)
            if not process.finished.done():
                process.kill()
                await asyncio.wait([process.finished], timeout=2.0)

    async def _run(self, code: str, deadline: float) -> tuple[_Call, bool]:
        """Send code and wait for its end; at the deadline it is interrupted. Gives the call and whether it was."""
        assert self._process is not None
        call = self._call = _Call(self._sandbox.spec.max_output_bytes)
        loop = asyncio.get_running_loop()
        self._process.write(self._order(code, call.new_mark()))
        try:
            await self._wait(call, deadline)
            timed_out = not call.done.is_set() and not self._process.finished.done()
            while timed_out and not call.done.is_set() and loop.time() < deadline + _COME_BACK_S:
                # The interrupt may have thrown the end mark away; only the newest one counts, so none is left behind.
                self._process.write(self._interruption(call.new_mark()))
                await self._wait(call, loop.time() + _INTERRUPT_EVERY_S)
        finally:
            self._call = None
            if not call.done.is_set():
                call.flush()
                self._process.kill()
        return call, timed_out

    async def _wait(self, call: _Call, until: float) -> None:
        assert self._process is not None
        done: asyncio.Future[Any] = asyncio.ensure_future(call.done.wait())
        ended: asyncio.Future[Any] = self._process.finished
        try:
            timeout = max(0.0, until - asyncio.get_running_loop().time())
            await asyncio.wait([done, ended], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            done.cancel()

    async def _reap(self, until: float) -> int:
        """The exit code of a process that has ended, or is being killed; the next call starts another one."""
        process, self._process = self._process, None
        assert process is not None
        await asyncio.wait([process.finished], timeout=max(0.0, until - asyncio.get_running_loop().time()))
        return process.finished.result() if process.finished.done() else 137

    def _on_output(self, stream: int, data: bytes) -> None:
        if self._call is not None:
            self._call.feed(stream, data)
