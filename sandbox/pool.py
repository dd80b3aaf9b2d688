"""Clean sandboxes kept warm, so that an episode does not wait for one to start."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from sparring.errors import SandboxError
from sparring.sandbox.core import Sandbox
from sparring.sandbox.spec import SandboxSpec

__all__ = ["SandboxPool"]

# A warm sandbox ages on its deadline: past this part of its lifetime it is not handed out any more.
_FRESH_PART = 0.5


class SandboxPool:
    """Up to `size` started sandboxes of one spec. Each is taken once, never returned, and replaced in the background.

    Args:
        make: makes a sandbox that is not started.
        size: sandboxes kept warm; 0 keeps none, and `take` starts one.
        starting: bounds the starts at once; a daemon that starts many together starts none of them sooner.
    """

    def __init__(
        self, make: Callable[[SandboxSpec], Sandbox], spec: SandboxSpec, size: int, starting: asyncio.Semaphore
    ) -> None:
        self._make = make
        self._spec = spec
        self._size = size
        self._starting = starting
        self._warm: deque[tuple[float, Sandbox]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refilling = 0
        self._closed = False

    def refill(self) -> None:
        """Start what is missing, in the background."""
        while not self._closed and len(self._warm) + self._refilling < self._size:
            self._refilling += 1
            self._spawn(self._add())

    async def take(self, *, timeout_s: float) -> Sandbox:
        """A clean, started sandbox: the caller's to stop.

        Raises:
            SandboxError: none could be started.
        """
        while self._warm:
            started, sandbox = self._warm.popleft()
            fresh = time.monotonic() - started < _FRESH_PART * self._spec.lifetime_s and await sandbox.alive()
            self.refill()
            if fresh:
                return sandbox
            self._spawn(sandbox.stop())
        return await self._start(timeout_s)

    async def ready(self) -> None:
        """Wait until the pool is full, or until every start in the background has failed."""
        while self._refilling:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """Stop what is warm."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(sandbox.stop() for _, sandbox in self._warm), return_exceptions=True)
        self._warm.clear()

    async def _add(self) -> None:
        try:
            # A start that fails here fails again, with its message, where somebody waits for it: in `take`.
            with contextlib.suppress(SandboxError):
                self._warm.append((time.monotonic(), await self._start(120.0)))
        finally:
            self._refilling -= 1

    async def _start(self, timeout_s: float) -> Sandbox:
        sandbox = self._make(self._spec)
        try:
            async with asyncio.timeout(timeout_s):
                async with self._starting:
                    await sandbox.start(timeout_s=timeout_s)
        except TimeoutError:
            raise SandboxError(f"no sandbox started within {timeout_s:g} s; too many at once?") from None
        return sandbox

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
