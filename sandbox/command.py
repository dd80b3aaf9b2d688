"""One command in a sandbox, from its start to its end, under a deadline that nothing inside can move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sparring.errors import SandboxError
from sparring.sandbox.process import CommandNotStarted, OnOutput
from sparring.sandbox.request import check_argv, check_env

if TYPE_CHECKING:
    from sparring.sandbox.core import Sandbox

__all__ = ["DEADLINE_GRACE_S", "Ended", "ExecResult", "answered_by", "held_to", "in_folder", "run_to_end"]

# A command's own clock ends it at `timeout_s`; the host steps in after _KILL_GRACE_S more, and gives the caller its
# result no later than DEADLINE_GRACE_S after `timeout_s`, whatever the command or the daemon does.
_KILL_GRACE_S = 1.0
DEADLINE_GRACE_S = 1.8
_RETRIES = 2  # of a command that was never run
_NO_FORK = b"timeout: fork system call failed"  # see `held_to`


@dataclass(frozen=True)
class ExecResult:
    """What a command gave.

    Attributes:
        exit_code: 128 + signal where a signal ended it.
        stdout, stderr: text; undecodable bytes become U+FFFD, and output beyond the bound is left out in the middle.
        truncated: some output was left out.
        timed_out: it was killed because its time was over.
        oom_killed: a process of the sandbox was killed for memory while it ran.
    """

    exit_code: int
    stdout: str
    stderr: str
    duration_s: float
    truncated: bool = False
    timed_out: bool = False
    oom_killed: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out


class Ended(NamedTuple):
    """How a command ended; its output went to whoever asked for it."""

    exit_code: int
    duration_s: float
    timed_out: bool


def held_to(timeout_s: float | None, argv: Sequence[str]) -> Sequence[str]:
    """`argv` under a clock inside the sandbox: SIGTERM at `timeout_s`, SIGKILL half a second later."""
    return argv if timeout_s is None else ["timeout", "-k", "0.5", f"{timeout_s:g}", *argv]


def in_folder(cwd: str | None, argv: Sequence[str]) -> Sequence[str]:
    """`argv` run in `cwd`, relative to the work folder; one that is not there fails the command, not the sandbox."""
    return ["sh", "-c", 'cd -- "$1" && shift && exec "$@"', "sh", cwd, *argv] if cwd else argv


@asynccontextmanager
async def answered_by(until: float, sandbox: Sandbox) -> AsyncIterator[None]:
    """What is asked of the sandbox besides a command must be answered by `until`, a time of the event loop's clock.

    Raises:
        SandboxError: it was not.
    """
    try:
        async with asyncio.timeout_at(until):
            yield
    except TimeoutError:
        raise SandboxError(
            f"{sandbox} gave no answer in the time of a command; overloaded, or its daemon hung?"
        ) from None


async def run_to_end(
    sandbox: Sandbox, argv: Sequence[str], on_output: OnOutput, *, timeout_s: float, **options: Any
) -> Ended:
    """Run a command, with the `options` of `Sandbox.exec`; returns within `timeout_s` + 2 s.

    Raises:
        SandboxRequestError: an argument or a variable that no process can be given.
        SandboxError: the sandbox broke, or did not start the command in time.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    for _ in range(_RETRIES):
        try:
            return await _run_once(sandbox, argv, on_output, timeout_s=max(0.1, until - loop.time()), **options)
        except CommandNotStarted:
            async with answered_by(until, sandbox):
                if loop.time() >= until or not await sandbox.alive():
                    raise
                await sandbox.clear()  # what earlier commands left behind has taken all processes there may be
    return await _run_once(sandbox, argv, on_output, timeout_s=max(0.1, until - loop.time()), **options)


async def _run_once(
    sandbox: Sandbox,
    argv: Sequence[str],
    on_output: OnOutput,
    *,
    timeout_s: float,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    user: str | None = None,
) -> Ended:
    check_argv(argv)
    check_env(env or {})
    loop = asyncio.get_running_loop()
    called = loop.time()
    complaint = bytearray()

    def heard(stream: int, data: bytes) -> None:
        if stream == 2 and len(complaint) < len(_NO_FORK):
            complaint.extend(data[: len(_NO_FORK)])
        on_output(stream, data)

    try:
        async with asyncio.timeout(timeout_s + _KILL_GRACE_S):
            process = await sandbox.spawn(
                argv, heard, stdin=bool(stdin), env=env, cwd=cwd, user=user, timeout_s=timeout_s
            )
    except TimeoutError:
        raise SandboxError(f"{sandbox}: no command could be started within {timeout_s:.3g} s; overloaded?") from None
    started = loop.time()
    killed = False
    try:
        if stdin:
            process.write(stdin)
            process.close_stdin()
        await asyncio.wait([process.finished], timeout=called + timeout_s + _KILL_GRACE_S - loop.time())
        if not process.finished.done():
            killed = True
            process.kill()
            await asyncio.wait([process.finished], timeout=called + timeout_s + DEADLINE_GRACE_S - loop.time())
    finally:
        # Cancelled, or killed without an end so far: ending goes on without the caller, who may call again.
        if not process.finished.done():
            process.kill()
    duration_s = loop.time() - started
    if killed and duration_s < timeout_s:
        raise SandboxError(f"{sandbox}: starting a command took {started - called:.1f} s of its {timeout_s:.3g} s")
    if not process.finished.done():
        return Ended(137, duration_s, timed_out=True)
    exit_code = process.finished.result()
    if exit_code == 125 and complaint.startswith(_NO_FORK):
        raise CommandNotStarted(f"{sandbox}: {complaint.decode(errors='replace')}")
    timed_out = killed or (exit_code in (124, 137) and duration_s >= timeout_s)
    return Ended(exit_code, duration_s, timed_out)
