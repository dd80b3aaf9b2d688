"""Whether two answers are the same number, by math-verify in worker processes that can be killed.

sympy can hang or eat all memory on a hostile answer, and its own time limits rest on signals, which only a main thread
has. So a check runs in a process, and one that hangs is killed and reported as a failure: it is no wrong answer. Two
plain numbers need no process, and most answers are some: a wait for two busy ones bound whole runs.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from fractions import Fraction

from sparring.envs.loop import private_loop, spawn
from sparring.errors import ConfigError, TaskError
from sparring.extras import missing

__all__ = ["answers_equal", "require_math_verify"]

_WORKERS = max(2, min(8, (os.cpu_count() or 2) // 4))
_START_TIMEOUT_S = 60.0
_MAX_CHARACTERS = 200  # a longer answer is no number, whatever it evaluates to
_PLAIN = re.compile(r"-?\d{1,9}(\.\d{1,6})?", re.ASCII)  # math-verify takes these for their value too: it rounds later


@functools.cache  # every episode has an environment of its own, and the search costs as much as the rest of its making
def require_math_verify() -> None:
    """Raises ConfigError where math-verify is not installed."""
    if lack := missing(["math_verify"], "checking answers"):
        raise ConfigError(lack)


async def answers_equal(gold: str, answer: str, *, timeout_s: float = 10.0) -> bool:
    """Whether `answer` has the value of `gold`. Both are plain numbers or LaTeX, without dollar signs.

    The workers are shared by the process and belong to the private event loop; this may be awaited on any loop.

    Raises:
        TaskError: the check hung or broke its worker, so that nothing is known of the answer.
    """
    if gold == answer:
        return True
    if not answer or len(answer) > _MAX_CHARACTERS:
        return False
    if _PLAIN.fullmatch(gold) and _PLAIN.fullmatch(answer):
        return Fraction(gold) == Fraction(answer)
    return await asyncio.wrap_future(spawn(_pool().check(gold, answer, timeout_s)))


class _Pool:
    """At most `_WORKERS` processes, started when first needed. A worker ends when its standard input closes."""

    def __init__(self) -> None:
        self.loop = private_loop()
        self.workers: set[Process] = set()
        self._free = asyncio.Semaphore(_WORKERS)
        self._idle: list[Process] = []

    @property
    def busy(self) -> int:
        return len(self.workers) - len(self._idle)

    async def check(self, gold: str, answer: str, timeout_s: float) -> bool:
        async with self._free:
            worker = await self._take_worker()
            try:
                async with asyncio.timeout(timeout_s):
                    verdict = await _ask(worker, {"gold": gold, "answer": answer})
            except BaseException as error:  # whatever it is, the worker may still be busy with this answer
                await self._kill(worker)
                if isinstance(error, TimeoutError):
                    raise TaskError(f"checking {answer!r} against {gold!r} hung for {timeout_s:g} s") from None
                if isinstance(error, (OSError, ValueError)):
                    raise TaskError(f"checking {answer!r} against {gold!r} broke its process: {error}") from error
                raise
            self._idle.append(worker)
            return verdict

    async def _take_worker(self) -> Process:
        while self._idle:
            worker = self._idle.pop()
            if worker.returncode is None:
                return worker
            self.workers.discard(worker)  # it died while it had nothing to do
        return await self._start_worker()

    async def _start_worker(self) -> Process:
        command = (sys.executable, "-m", "sparring.envs.math_worker")
        worker = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        self.workers.add(worker)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                assert worker.stdout is not None
                if await worker.stdout.readline():
                    return worker
            raise TaskError("the process that checks answers died as it started: does `import math_verify` work?")
        except BaseException as error:
            await self._kill(worker)
            if isinstance(error, TimeoutError):
                raise TaskError(f"the process that checks answers took over {_START_TIMEOUT_S:g} s to start") from None
            raise

    async def _kill(self, worker: Process) -> None:
        self.workers.discard(worker)
        if worker.returncode is None:
            worker.kill()
        await asyncio.shield(worker.wait())


_current: _Pool | None = None


def _pool() -> _Pool:
    global _current
    if _current is None or _current.loop is not private_loop():  # a forked child has a loop and workers of its own
        _current = _Pool()
    return _current


async def _ask(worker: Process, question: dict[str, str]) -> bool:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(question).encode() + b"\n")
    await worker.stdin.drain()
    line = await worker.stdout.readline()
    if not line:
        raise OSError("it exited")
    return bool(json.loads(line)["equal"])
