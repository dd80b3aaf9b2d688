"""A program run to its end, with bounded output, and nothing of it left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparring.errors import ConfigError
from sparring.sandbox.process import HostProcess

__all__ = ["Finished", "run_program"]

_OUTPUT_BYTES = 2**20
_KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Finished:
    """Exit status (128 + signal where one ended it), and what was written, each stream cut at a mebibyte."""

    status: int
    output: str
    errors: str


async def run_program(
    command: Sequence[str], given: str, environ: Mapping[str, str], cwd: str | Path | None = None
) -> Finished:
    """Run a command with `given` on its standard input. Its end, or cancelling, kills all that is in its session.

    What left that session lives on, and holds nobody up by keeping the output open.

    Raises:
        ConfigError: there is no such program.
    """
    written = {1: bytearray(), 2: bytearray()}

    def keep(stream: int, data: bytes) -> None:
        written[stream] += data[: _OUTPUT_BYTES - len(written[stream])]

    process = HostProcess(keep)
    try:
        await process.start(command, env=environ, cwd=cwd, stdin=True)
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]}: {error}") from error
    try:
        process.write(given.encode("utf-8", "replace"))
        process.close_stdin()
        await asyncio.wait([process.finished])
    finally:
        if not process.finished.done():
            process.kill()
            await asyncio.wait([process.finished], timeout=_KILL_TIMEOUT_S)
    output, errors = (bytes(written[stream]).decode("utf-8", "replace") for stream in (1, 2))
    return Finished(process.finished.result(), output, errors)
