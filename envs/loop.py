"""The event loop behind Gymnasium's synchronous face: one private thread, shared by all environments of a process.

A loop of its own makes `env.step` work in scripts, in Jupyter and inside a running loop alike.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["can_wait", "private_loop", "run_sync", "spawn"]

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def private_loop() -> asyncio.AbstractEventLoop:
    """The loop, started at first use. Its thread is a daemon: it never keeps a process alive."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="sparring-envs", daemon=True).start()
        return _loop


def _forget_after_fork() -> None:
    """A forked child has no thread behind its parent's loop, and may have inherited a lock that is held."""
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)


def spawn(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine on the private loop, from any thread."""
    return asyncio.run_coroutine_threadsafe(coroutine, private_loop())


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the private loop and wait for it. Ctrl-C while waiting cancels it.

    Raises:
        RuntimeError: called where waiting would never end.
    """
    if not can_wait():
        coroutine.close()
        raise RuntimeError("reset, step and close cannot be called from inside a tool: await areset, astep, aclose")
    future = spawn(coroutine)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def can_wait() -> bool:
    """Whether waiting for the private loop here can end: not on the loop itself, nor as the interpreter goes down."""
    if sys.is_finalizing():
        return False
    try:
        return asyncio.get_running_loop() is not _loop
    except RuntimeError:
        return True
