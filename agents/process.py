"""A program run to its end, with bounded output, and nothing of it left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparring.errors import ConfigError

__all__ = ["Finished", "run_program"]

_OUTPUT_BYTES = 2**20
_CHUNK_BYTES = 2**16
_KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Finished:
    """Exit status (negative: the signal that ended it), and what was written, each stream cut at a mebibyte."""

    status: int
    output: str
    errors: str


async def run_program(
    command: Sequence[str], given: str, environ: Mapping[str, str], cwd: str | Path | None = None
) -> Finished:
    """Run a command with `given` on its standard input. Cancelling kills it, and all that it started in its session.

    Raises:
        ConfigError: there is no such program.
    """
    loop = asyncio.get_running_loop()
    try:
        transport, protocol = await loop.subprocess_exec(
            lambda: _Protocol(limit=_CHUNK_BYTES, loop=loop), *command, env=environ, cwd=cwd, start_new_session=True
        )
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]}: {error}") from error
    process = asyncio.subprocess.Process(transport, protocol, loop)
    try:
        async with asyncio.TaskGroup() as group:
            output = group.create_task(_read(process.stdout))
            errors = group.create_task(_read(process.stderr))
            group.create_task(_write(process.stdin, given.encode()))
            await protocol.exited.wait()
            _kill_session(process)  # or what it left running would hold the pipes open
    finally:
        _kill_session(process)
        async with asyncio.timeout(_KILL_TIMEOUT_S):
            status = await process.wait()
    return Finished(status, output.result(), errors.result())


class _Protocol(asyncio.subprocess.SubprocessStreamProtocol):
    """Tells when the program itself has ended, which `Process.wait` does only once its pipes are closed too."""

    def __init__(self, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit, loop)
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


async def _read(stream: asyncio.StreamReader | None) -> str:
    kept = bytearray()
    while stream is not None and (part := await stream.read(_CHUNK_BYTES)):
        kept += part[: _OUTPUT_BYTES - len(kept)]
    return kept.decode("utf-8", "replace")


async def _write(stream: asyncio.StreamWriter | None, data: bytes) -> None:
    assert stream is not None
    try:
        stream.write(data)
        await stream.drain()
        stream.close()
        await stream.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        pass  # a program is free to read nothing


def _kill_session(process: asyncio.subprocess.Process) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
