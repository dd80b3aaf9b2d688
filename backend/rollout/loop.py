"""An event loop in a thread of its own, which other threads hand coroutines to and wait for."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from sparring.collector import seldom_collecting
from sparring.errors import TrainerError, first_error

__all__ = ["LoopThread"]

T = TypeVar("T")

_POLL_S = 0.5
_BEAT_S = 0.5
# Both sides let go of the interpreter thousands of times a second, the loop at its sockets and the trainer at every
# operation of PyTorch, and each time wait up to so long for the other to hand it back: Python's 5 ms would bind the
# loop. A fifth of this made no difference that could be told (`benchmarks.rollouts --switch 0.0001`).
_SWITCH_S = 0.0005
_GRACE_S = 10.0  # what a coroutine past its deadline gets for ending, before its caller leaves it behind


class LoopThread:
    """The thread is a daemon: one that hangs in a blocking call keeps no process from ending.

    While it runs, threads of this process hand the interpreter over more often than Python's default, and its garbage
    collector runs seldomer.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._beat = time.monotonic()
        self._settings = contextlib.ExitStack()  # of the interpreter, and how they were

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def silent_s(self) -> float:
        """Seconds since the loop last ran anything: more than a few, and something blocks it."""
        return max(0.0, time.monotonic() - self._beat - _BEAT_S)

    def start(self) -> None:
        self._beat = time.monotonic()
        self._settings.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._settings.enter_context(seldom_collecting())
        self._thread.start()

    def call(self, callback: Callable[[], object]) -> None:
        """Run `callback` on the loop soon, without waiting; a loop that has ended runs nothing."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def run(
        self, coroutine: Coroutine[Any, Any, T], timeout_s: float, *, check: Callable[[], None] = lambda: None
    ) -> T:
        """Run `coroutine` on the loop and wait for it here: `submit`, then `wait`."""
        return self.wait(self.submit(coroutine, timeout_s), timeout_s, check=check)

    def submit(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> Future[T]:
        """Run `coroutine` on the loop, for so long at most, without waiting for it.

        Raises:
            TrainerError: the loop does not run.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("LoopThread.run waits for its loop: on the loop itself, await the coroutine instead")
        if not self.alive:
            coroutine.close()
            raise TrainerError("the rollout worker's event loop does not run: open the worker first, and stop it last")
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, timeout_s), self._loop)

    def wait(self, future: Future[T], timeout_s: float, *, check: Callable[[], None] = lambda: None) -> T:
        """Wait for what `submit` gave; `check` runs every half second and may raise, which cancels it.

        Raises:
            TimeoutError: it did not end in time, and was cancelled.
            Exception: what it raised; of an exception group, the first error.
            TrainerError: the loop is gone, or answers no more.
        """
        deadline = time.monotonic() + timeout_s + _GRACE_S
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    return future.result(_POLL_S)
                if future.done():
                    return future.result()  # a TimeoutError of the coroutine's own
                check()
                if not self.alive or time.monotonic() > deadline:
                    raise TrainerError(
                        f"the rollout worker's event loop has not answered for {self.silent_s:.0f} s: "
                        "something blocks it, perhaps an environment that waits without await"
                    )
        except ExceptionGroup as group:
            raise first_error(group) from group
        except CancelledError as error:
            raise TrainerError("the rollout worker's event loop ended while something waited for it") from error
        except BaseException:
            future.cancel()
            raise

    def stop(self, timeout_s: float) -> bool:
        """End the loop and its thread; False where the thread did not end in time and was left behind."""
        if self.alive:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)
        elif not self._loop.is_closed():  # never started
            self._loop.close()
        self._settings.close()
        return not self.alive

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._tick()
        try:
            self._loop.run_forever()
        finally:
            leftovers = asyncio.all_tasks(self._loop)
            for task in leftovers:
                task.cancel()
            if leftovers:
                self._loop.run_until_complete(asyncio.wait(leftovers, timeout=1.0))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _tick(self) -> None:
        self._beat = time.monotonic()
        self._loop.call_later(_BEAT_S, self._tick)
